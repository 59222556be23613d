"""A translator that runs a folder exported to CTranslate2."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from ..checkpoint_files import CONFIG, CTRANSLATE2, read_fields
from ..errors import UserError, need, one_line
from ..exporting.ctranslate2_folder import engine_options
from ..generation_fields import check_generation_fields
from ..loading import load_tokenizer
from ..models.language_pairs import TARGET_CODE, Choice, Languages
from ..models.plain_text import MOST_TOKENS, source_limit
from ..models.saved_fields import FIELDS

LIMIT = 1024  # CTranslate2's default for the tokens that it reads of a source


def is_engine(where: str | os.PathLike) -> bool:
    """Return True if the folder was exported to CTranslate2."""
    return (Path(where) / CTRANSLATE2).is_file()


class Engine:
    """A model that CTranslate2 runs, with its tokenizer from the same folder.

    The beam search stops as `generate` does with `early_stopping=True`.

    Args:
        folder: the output of `export_ctranslate2`, or of a converter of CTranslate2, with a tokenizer of Transformers.
        device: a CPU, or one of several GPUs. None: a GPU if there is one.

    Raises:
        UserError: ctranslate2 is not installed, or the folder is damaged.
    """

    def __init__(self, folder: str | os.PathLike, device: torch.device | None = None) -> None:
        self.folder = Path(folder)
        ctranslate2 = need("ctranslate2", "ctranslate2", f"{folder}, a model of CTranslate2's,")
        self.tokenizer = load_tokenizer(self.folder)
        limit = source_limit(SimpleNamespace(), self.tokenizer)
        self.limit = LIMIT if limit == MOST_TOKENS else limit  # the engine's files name no limit
        device = device or torch.device("cuda" if ctranslate2.get_cuda_device_count() else "cpu")
        try:
            self.translator = ctranslate2.Translator(os.fspath(folder), device.type, device_index=device.index or 0)
            config = read_fields(self.folder / CONFIG)
            self.generation_config = self._generation_config()
            model = SimpleNamespace(**{name: getattr(self.generation_config, name) for name in FIELDS})
            self.languages = Languages(model, self.generation_config, self.tokenizer)
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"{folder} cannot be loaded by CTranslate2: {one_line(error)}") from error
        self.starts_from_target = config.get("decoder_start_token", "") is None

    def _generation_config(self) -> GenerationConfig:
        """Return the search settings of the exported model, with `early_stopping` as in the engine."""
        path, fields = self.folder / GENERATION_CONFIG_NAME, {}
        if path.is_file():
            fields = read_fields(path)
            check_generation_fields(fields)
        settings = GenerationConfig.from_dict(fields)
        settings.early_stopping = True
        for name in FIELDS:  # `from_dict` drops them if the fields come from a model's config
            setattr(settings, name, fields.get(name))
        return settings

    def choose(self, source_lang: str | None = None, target_lang: str | None = None) -> Choice:
        """Choose a language pair as `Languages.choose` does.

        If the decoder starts from the tag of the target language, the source gets no tag.

        Raises:
            ValueError: the model does not support a language, or a language is missing.
        """
        choice = self.languages.choose(source_lang, target_lang)
        if self.languages.pairs and not self.starts_from_target:  # all pairs start alike, and the engine does it
            return choice._replace(settings={})
        if self.starts_from_target and choice.tag_id is not None:
            choice = choice._replace(tag_id=None, settings={"decoder_start_token_id": choice.tag_id})
        if self.starts_from_target and not self.prefix(choice):
            raise ValueError("the decoder starts from the token of the target language: give the target language")
        return choice

    def prefix(self, choice: Choice) -> list[int]:
        """Return the token ids with which a translation for this choice begins."""
        own = {"forced_bos_token_id": self.generation_config.forced_bos_token_id}
        settings = {name: choice.settings[name] for name in TARGET_CODE if name in choice.settings} or own
        return [token_id for token_id in settings.values() if token_id is not None]

    def search(
        self,
        choice: Choice,
        rows: list[list[int]],
        *,
        beams: int,
        length_penalty: float,
        longest: int,
        **options: Any,
    ) -> list[Any]:
        """Translate sources, and return CTranslate2's results. Hypotheses do not include the decoder's start token.

        Args:
            choice: the language pair.
            rows: token ids of each source.
            beams: beam size.
            length_penalty: hypotheses are ranked by log-probability / length**length_penalty.
            longest: most tokens of a translation, a forced end token included, as `generate` counts them.
            options: further arguments of `Translator.translate_batch`.
        """
        prefix = self.tokenizer.convert_ids_to_tokens(self.prefix(choice))
        own = engine_options(self.generation_config, self.tokenizer, min(longest, self.limit))
        return self.translator.translate_batch(
            [self.tokenizer.convert_ids_to_tokens(row) for row in rows],
            target_prefix=[prefix for _ in rows] if prefix else None,
            beam_size=beams,
            length_penalty=length_penalty,
            max_input_length=self.limit,
            **{"num_hypotheses": beams, "return_scores": True, **own, **options},
        )
