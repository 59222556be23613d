"""Use the result of `share` in another process: without this package, or with the copy of the package in a Space."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ..checkpoint_files import read_config
from ..families import all_families
from .space import MODEL

USE_STOCK = """
import sys
sys.modules["hf_deepwide"] = None  # importing it fails
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model, info = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], output_loading_info=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
assert not (info["missing_keys"] or info["unexpected_keys"]), info
assert type(model).__module__.startswith("transformers.models."), type(model)
model.generate(**tokenizer("1", return_tensors="pt"), max_length=4, num_beams=1)
"""
USE = """
import sys, torch
sys.modules["hf_deepwide"] = None  # importing it fails
from transformers import AutoModel, pipeline
AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
translator = pipeline("translation", model=sys.argv[1], trust_remote_code=True, device="cpu")
for loaded in (translator, translator.model, translator.model.config):
    assert type(loaded).__module__.startswith("transformers_modules."), type(loaded)
_, info = type(translator.model).from_pretrained(sys.argv[1], output_loading_info=True)
assert not (info["missing_keys"] or info["unexpected_keys"]), info
pairs = getattr(translator.model.config, "translation_pairs", None)
codes = [*translator.languages.codes]
chosen = next(iter(pairs)).split("-", 1) if pairs else codes[:1] + codes[-1:]
options = dict(zip(("src_lang", "tgt_lang"), chosen))
if not pairs and getattr(translator.model.config, "num_posteriors", 1) > 1:
    options["posteriors"] = torch.tensor([0])  # the pipeline knows no languages to choose by
translator("1", **options, max_length=4, num_beams=1)
"""
USE_ENCODER = """
import functools, sys, torch
sys.modules["hf_deepwide"] = None  # importing it fails
from transformers import AutoModel, pipeline
folder, task = sys.argv[1:]
AutoModel.from_pretrained(folder, trust_remote_code=True)
use = pipeline(task, model=folder, trust_remote_code=True, device="cpu")
for loaded in (use.model, use.model.config):
    assert type(loaded).__module__.startswith("transformers_modules."), type(loaded)
_, info = type(use.model).from_pretrained(folder, output_loading_info=True)
assert not (info["missing_keys"] or info["unexpected_keys"]), info
if getattr(use.model.config, "num_posteriors", 1) > 1:
    use.model.forward = functools.partial(use.model.forward, posteriors=torch.tensor([0]))
use(use.tokenizer.mask_token if task == "fill-mask" else "1")
"""
USE_SPACE = """
import pathlib, sys
from hf_deepwide.demo import systems
assert pathlib.Path(systems.__file__).is_relative_to(pathlib.Path.cwd()), systems.__file__
systems.load_systems([sys.argv[1]])
"""


def verify_folder(folder: str | os.PathLike, task: str = "translation") -> None:
    """Load a shared folder and use it for its task, in a process that cannot import this package.

    Raises:
        RuntimeError: the process failed. The message ends with the error output of the process.
    """
    use = USE if task == "translation" else USE_ENCODER
    use = use if read_config(Path(folder)).get("model_type") in all_families() else USE_STOCK
    with tempfile.TemporaryDirectory() as modules:
        # a separate cache of remote code: no code of an earlier share is loaded, and no files stay behind
        environment = {**os.environ, "HF_MODULES_CACHE": modules, "HF_HUB_OFFLINE": "1"}
        process = subprocess.run(
            [sys.executable, "-c", use, str(Path(folder).resolve()), *([task] if use == USE_ENCODER else [])],
            cwd=modules,  # not the caller's folder: Python would import modules from there
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if process.returncode:
        raise RuntimeError(f"the shared folder does not load without hf_deepwide:\n{process.stderr[-3000:]}")


def verify_space(folder: Path, hub_model: str | None) -> None:
    """Load the model of a Space and translate with it in another process, which runs the code in the Space's folder.

    Raises:
        RuntimeError: the process failed. The message ends with the error output of the process.
    """
    process = subprocess.run(
        [sys.executable, "-B", "-c", USE_SPACE, hub_model or MODEL],
        cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if process.returncode:
        raise RuntimeError(f"the Space does not load its model:\n{process.stderr[-3000:]}")
