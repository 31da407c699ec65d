"""Where public question sets are, and a download that resumes, checks and leaves no half file.

Used by `python data/convert.py SET --download`.
"""

import hashlib
import os
import sys
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from plumbing.files import DataError, check  # noqa: E402

HUB = "https://huggingface.co/datasets"
HOTPOTQA = "http://curtis.ml.cmu.edu/datasets/hotpot"
TWO_WIKI = f"{HUB}/voidful/2WikiMultihopQA/resolve/main"
MUSIQUE = f"{HUB}/bdsaglam/musique/resolve/main"
FLASHRAG = f"{HUB}/RUC-NLPIR/FlashRAG_datasets/resolve/main"
FLASHRAG_SPLITS = """nq/train nq/dev nq/test triviaqa/train triviaqa/dev triviaqa/test popqa/test
hotpotqa/train hotpotqa/dev 2wikimultihopqa/train 2wikimultihopqa/dev musique/train musique/dev
bamboogle/test""".split()

# {set: {split: (address, SHA-256)}}. HotpotQA's address is its authors'. 2Wiki and MuSiQue publish
# archives on Dropbox and Google Drive; these are mirrors of the files in them (2Wiki's first
# edition; in April 2021 it split its sentences anew). The hashes are those that several public
# projects record for these files; None: we know of none.
PUBLIC = {
    "hotpotqa": {
        "train": (
            f"{HOTPOTQA}/hotpot_train_v1.1.json",
            "26650cf50234ef5fb2e664ed70bbecdfd87815e6bffc257e068efea5cf7cd316",
        ),
        "dev": (
            f"{HOTPOTQA}/hotpot_dev_distractor_v1.json",
            "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
        ),
    },
    "2wiki": {
        "train": (
            f"{TWO_WIKI}/train.json",
            "b3fddb4d5bb42cd797919cad67616545be51b24740e0a7dabdae7bf76b8f7bfa",
        ),
        "dev": (
            f"{TWO_WIKI}/dev.json",
            "48b9bdc69654dc580fda5f935a48b88cb89f11887587310af60d406c8d0111a6",
        ),
    },
    "musique": {
        "train": (
            f"{MUSIQUE}/musique_ans_v1.0_train.jsonl",
            "83a75b1e11e4e9bb8f8308e72ac40ca617ae4431b3a0d955b61cab259248490a",
        ),
        "dev": (
            f"{MUSIQUE}/musique_ans_v1.0_dev.jsonl",
            "15fa63794d18a94ce12411aca6e2327e65b6e83b0b1490efab3f1962e48abf3b",
        ),
    },
    "flashrag": {split: (f"{FLASHRAG}/{split}.jsonl", None) for split in FLASHRAG_SPLITS},
}
TIMEOUT = 30  # seconds without a byte


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def fetch(url, part):
    """Append to the file `part` what it lacks of the file at `url`. Raises DataError, OSError,
    HTTPException."""
    from tqdm import tqdm  # here: converting needs no packages

    have = size_of(part)
    headers = {"User-Agent": "convert.py"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        with error:
            # Nothing follows: all is there, or it is a part of something else
            if error.code == 416 and have:
                if error.headers.get("Content-Range") != f"bytes */{have}":
                    part.unlink()
                    fetch(url, part)
                return
            raise DataError(f"{url}: status {error.code} {error.reason!r:.60}") from None
    with response:
        is_page = response.headers.get_content_type() == "text/html"
        check(not is_page, url, "a web page came back, not the file")
        sent = response.headers.get("Content-Range", "")
        resumes = response.status == 206 and sent.startswith(f"bytes {have}-")
        problem = f"status {response.status}, but not with the part that was asked for"
        check(response.status == 200 or resumes, url, problem)
        start = have if resumes else 0  # a server without Range sends all of it again
        total = None if response.length is None else start + response.length
        bar = tqdm(desc=part.stem, initial=start, total=total, unit="B", unit_scale=True)
        with open(part, "ab" if resumes else "wb") as file, bar:
            while block := response.read(1 << 16):
                file.write(block)
                bar.update(len(block))
    if total is not None and size_of(part) != total:
        raise ConnectionError(f"it broke off after {size_of(part):,} of {total:,} bytes")


def download(url, path, sha256, read):
    """Make the file at `url` the file `path`, which appears only when it is complete and checked.

    Until then it grows as `path`.part, which a later call goes on with. Checked are the length that
    the server names, and the SHA-256 or, where it is None, that `read` (which yields items) gets
    through the file. Raises DataError.
    """
    if path.exists():
        print(f"{path}: already there")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    while True:
        before = size_of(part)
        try:
            fetch(url, part)
            break
        except (OSError, HTTPException) as error:
            if size_of(part) > before:  # as long as it grows, go on
                continue
            reason = getattr(error, "reason", None) or error
            kept = f"{before:,} bytes are kept, the same command goes on from there; "
            kept = kept if size_of(part) else ""
            hint = f"{kept}or get the file by other means and give its path"
            raise DataError(f"{url}: cannot be fetched: {reason}; {hint}") from None
    digest = hashlib.sha256()
    with open(part, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    try:
        if sha256 and digest.hexdigest() != sha256:
            raise DataError(f"its SHA-256 is {digest.hexdigest()}, not {sha256}")
        found = "as expected"
        if not sha256:
            found = f"with {sum(1 for _ in read(part))} items (no hash to compare with)"
    except DataError as error:
        part.unlink()
        raise DataError(f"{url}: not the expected file, thrown away: {error}") from None
    os.replace(part, path)
    print(f"{path}: SHA-256 {digest.hexdigest()} {found}")


if __name__ == "__main__":
    print(__doc__)
