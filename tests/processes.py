"""Forked processes, which tests kill, signal, or leave without room on the disk."""

import os
import signal
import sys
import threading
import traceback

import pytest
import torch
import tqdm.auto

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="these tests fork")


def in_child(function):
    """Run a function in a forked process, whose exit code it returns; gives the process's id."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            torch.set_num_threads(1)  # other threads did not survive the fork
            for bar in (tqdm.std.tqdm, tqdm.auto.tqdm):
                bar.set_lock(threading.RLock())  # the usual one is shared: a killed child keeps it
            code = function() or 0
        except SystemExit as leave:
            if isinstance(leave.code, str):
                print(leave.code, file=sys.stderr)
            code = leave.code if isinstance(leave.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def outcome(pid):
    """The exit code of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def limit_files(size):
    """In this process no file can grow beyond so many bytes, as on a full disk."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
