"""What scale.py needs of TRL: its settings, its log in our files, and rollouts sampled by vLLM.

The part for vLLM is written against the documented interface of trl 1.16 and tested with a stand-in
for the engine; vLLM needs a GPU, and has not been run.
"""

import torch

import reward
from plumbing import files, logs, models, options
from plumbing.generation import Piece

CHECKPOINTS = "checkpoints"  # of a run: TRL's
SAME = "num_generations num_iterations temperature learning_rate epsilon beta max_grad_norm".split()
SAME += ["seed", "gradient_checkpointing", "report_to"]


def trl_config(settings, words, run, processes):
    """TRL's GRPOConfig: ours where they have the same meaning, then its own words."""
    from trl import GRPOConfig

    rows = settings.num_questions * settings.num_generations
    where, problem = f"--num_questions {settings.num_questions}", "must be a multiple of"
    files.check(settings.num_questions % processes == 0, where, f"{problem} {processes} processes")
    parser, ours = options.Parser(GRPOConfig), {name: getattr(settings, name) for name in SAME}
    ours |= {"output_dir": str(run / CHECKPOINTS), "max_steps": settings.steps}
    ours |= {"per_device_train_batch_size": settings.num_generations, "logging_steps": 1}
    ours |= {"max_completion_length": settings.max_context, "save_steps": settings.save_every}
    ours |= {"loss_type": "dapo", "use_bias_correction_kl": False, "save_total_limit": 2}
    ours |= {"vllm_mode": "colocate", "vllm_max_model_length": settings.max_context}
    ours |= {"bf16": models.device_and_dtype()[1] == torch.bfloat16, "disable_tqdm": True}
    ours |= {"use_cpu": not torch.cuda.is_available(), "ddp_find_unused_parameters": False}
    parser.set_defaults(**ours)
    args = parser.parse_args(words)
    at_once = processes * args.per_device_train_batch_size
    where = f"--per_device_train_batch_size {args.per_device_train_batch_size}"
    files.check(rows % at_once == 0, where, f"{rows} is no multiple of {at_once} rollouts at once")
    args.gradient_accumulation_steps = rows // at_once
    together = args.use_vllm and (args.vllm_mode == "server" or args.vllm_tensor_parallel_size > 1)
    problem = "turns end apart: only --vllm_mode colocate, a GPU each"
    files.check(processes == 1 or not together, f"--use_vllm with {processes} processes", problem)
    with files.on_failure("TRL's options"):
        return GRPOConfig(**vars(args))


def make_logger(run):
    """A callback that writes TRL's log, with our metrics in it, to the run's metrics.jsonl."""
    from transformers import TrainerCallback

    class Log(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            for name in (logs.METRICS, logs.SAMPLES) if state.is_world_process_zero else ():
                logs.drop_later_lines(run / name, state.global_step)

        def on_log(self, args, state, control, **more):
            row = {name: round(value, 6) for name, value in more["logs"].items()}
            if state.is_world_process_zero and "reward" in row:
                files.append_line(run / logs.METRICS, {"step": state.global_step - 1} | row)
                text = "reward {reward:.2f}, EM {em:.2f}, depth {search_depth:.2f}".format(**row)
                print(f"step {state.global_step} of {state.max_steps}: {text}", flush=True)

    return Log()


class VLLMPolicy:
    """A policy whose rollouts are sampled by TRL's vLLM engine: `rollout` writes in its batch."""

    def __init__(self, model, tokenizer, engine):
        self.model, self.tokenizer, self.engine = model, tokenizer, engine

    @property
    def batch(self):
        return VLLMBatch


class VLLMBatch:
    """What `generation.CachedBatch` is to a rollout, on vLLM: rows of token ids, which vLLM's own
    cache recognises. Ids and log-probabilities are those that it sampled, never encoded again."""

    def __init__(self, policy, rows):
        self.policy, self.rows, self.pending = policy, rows, [[] for _ in rows]

    @classmethod
    def start(cls, policy, prompts, repeats, columns=0):
        return cls(policy, [list(prompt) for prompt in prompts for _ in range(repeats)]), None

    def append(self, rows):
        self.rows = [row + new for row, new in zip(self.rows, rows)]

    def write(self, logits, limit, stops, sampler):
        """Pieces that end with a tag of `stops`, found in the text, an EOS, or at the limit."""
        engine, ends = self.policy.engine, [tag for tag in reward.TAGS if stops.search(tag)]
        engine.max_completion_length = limit
        engine.generation_kwargs = {"stop": ends, "include_stop_str_in_output": True}
        _, written, logps, _ = engine.generate(self.rows, None, 1)
        self.append(written)
        logps = [[of_token[0] for of_token in row] for row in logps]
        return [Piece(*piece) for piece in zip(written, logps)]

    def branch(self, rows, *how):
        branches = [row + new for row, new in zip(self.rows, rows)]
        return VLLMBatch(self.policy, branches).write(None, *how)

    def keep(self, rows):
        self.rows, self.pending = [self.rows[row] for row in rows], [[] for _ in rows]

    def decode(self, ids):
        return self.policy.tokenizer.decode(ids, skip_special_tokens=True)
