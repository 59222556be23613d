"""The code in a shared checkpoint, which stays with the checkpoint when a user saves it again.

A config that `share` has written names the modules beside it in `auto_map` and `custom_pipelines`. When a user loads
such a checkpoint and saves it again, as every Trainer does, these modules are saved, too. Transformers itself would
not save the pipeline. If this package is imported, it would save none of the code.
"""

import shutil
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from .pipeline_registration import TranslationPipeline  # relative, so that its files are copied with every model's

HERE = Path(__file__).parent


def reference(cls: type) -> str:
    """Return the name of a class in `auto_map`: `module.Class`."""
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"


CUSTOM_PIPELINES: dict[str, dict[str, Any]] = {
    "translation": {"impl": reference(TranslationPipeline), "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
}


def is_remote(cls: type) -> bool:
    """Return True if a class comes with a checkpoint, False if it comes from this package."""
    return cls.__module__.startswith("transformers_modules.")


def own_entries(auto_map: Any, config_class: type) -> dict[str, str]:
    """Return the entries of an `auto_map`, or {} if the map does not belong to the config class.

    A map from another source may name any code, and a checkpoint of this package must not pass on such code.
    """
    if not isinstance(auto_map, dict):
        return {}
    entries = {name: entry.rpartition("--")[2] for name, entry in auto_map.items() if isinstance(entry, str)}
    return entries if entries.get("AutoConfig") == reference(config_class) else {}


def copy_code(auto_map: dict[str, str], folder: Path) -> dict[str, str]:
    """Copy the modules of an `auto_map`, their relative imports, and the pipeline to a folder.

    Returns:
        The entries whose module is in the folder. A module that this process has not loaded may be absent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {}
    for name, entry in auto_map.items():
        module = f"{entry.partition('.')[0]}.py"
        if Path(module).name == module and (HERE / module).is_file():
            _copy(HERE / module, folder)
        if (folder / module).is_file():
            kept[name] = entry
    _copy(HERE / f"{TranslationPipeline.__module__.rpartition('.')[2]}.py", folder)
    return kept


def _copy(module: Path, folder: Path) -> None:
    for file in {module, *map(Path, get_relative_import_files(module))}:
        shutil.copyfile(file, folder / file.name)
