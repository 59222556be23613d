"""The files of a Hugging Face Space that shows a model on the page of `hf_deepwide.demo`.

A Space is a repository with an app. This package is in no package index, so its code is copied into the Space.
"""

import platform
import shutil
from importlib.metadata import requires, version
from pathlib import Path

import yaml

from .. import card_text
from ..card_text import CARD

MODEL = "model"  # the model's folder in a Space
APP, REQUIREMENTS = "app.py", "requirements.txt"
GRADIO = "6.31.0"  # the tested version, see constraints.txt
PACKAGE = Path(__file__).parents[1]

APP_TEXT = """\
\"\"\"Show the model on the page of hf_deepwide's demo.\"\"\"

{imports}from hf_deepwide.demo import serve

serve([{model}])
"""
CARD_TEXT = """\
# {title}

Translate with the model, and look inside: all beams with their scores, times, and pictures of what the architecture
did. The page is `hf-deepwide demo` of hf_deepwide {version}, whose code is in the folder `hf_deepwide` (Apache-2.0).

On your own machine:

{commands}
"""


def write_space(folder: Path, title: str, hub_model: str | None = None, license: str | None = None) -> None:
    """Write all files of a Space except its model.

    Args:
        folder: the Space's folder, which must exist.
        title: the title of the Space.
        hub_model: the Hub id of the model. None: the model lies in the folder `MODEL`.
        license: the Hub's name of the licence. None: the card names no licence.
    """
    imports = "" if hub_model else "from pathlib import Path\n\n"
    model = repr(hub_model) if hub_model else f'Path(__file__).parent / "{MODEL}"'
    (folder / APP).write_text(APP_TEXT.format(imports=imports, model=model), encoding="utf-8")
    needed = [line for line in requires("hf_deepwide") or () if "extra ==" not in line]
    needed.append("sentencepiece")  # for the tokenizers of Marian, M2M100 and mBART
    (folder / REQUIREMENTS).write_text("\n".join(needed) + "\n", encoding="utf-8")
    (folder / CARD).write_text(_card(title, hub_model, license), encoding="utf-8")
    for source in PACKAGE.rglob("*.py"):
        target = folder / PACKAGE.name / source.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _card(title: str, hub_model: str | None, license: str | None) -> str:
    """Return the text of README.md. Its front matter holds the settings with which the Hub runs the Space."""
    fields = {
        "title": title,
        "emoji": "🔎",
        "colorFrom": "blue",
        "colorTo": "yellow",
        "sdk": "gradio",
        "sdk_version": GRADIO,
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "app_file": APP,
        "pinned": False,
        "tags": ["translation", "hf_deepwide"],
        **({"models": [hub_model]} if hub_model else {}),
        **({"license": license} if license else {}),
    }
    commands = card_text.block(f"pip install gradio=={GRADIO} -r {REQUIREMENTS}\npython {APP}", "shell")
    text = CARD_TEXT.format(title=card_text.text(title), version=version("hf_deepwide"), commands=commands)
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---\n\n{text}"
