"""Export to CTranslate2, an engine for translation on CPUs and GPUs, with weights of eight bits on request.

    export_ctranslate2("runs/mat", "exported")                          # float32
    export_ctranslate2("runs/mat", "exported-int8", quantization="int8")

The folder holds the model, its tokenizer, and a README with code that translates. This code needs ctranslate2 and
transformers, but not this package.
"""

import copy
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from ..card_text import CARD, literal
from ..durable import check_output, saving, whole_folder
from ..errors import UserError, need, quote
from ..models.language_pairs import Languages
from ..models.saved_fields import FIELDS
from .opening import Opened, open_model, warn_of_rules
from .shown_languages import packages, shown_languages

logger = logging.getLogger(__name__)

EXACT = "float32"
UNKNOWN_RULES = (
    "begin_suppress_tokens",
    "sequence_bias",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
)
QUANTIZATIONS = (
    "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", EXACT,
)  # fmt: skip
SHORT = 120  # options with fewer characters stand on one line of the README
TOLERANCE = 1e-3  # largest error of log-probabilities in float32, relative to the largest of them or to 1


def export_ctranslate2(
    model: str | os.PathLike | PreTrainedModel,
    folder: str | os.PathLike,
    *,
    quantization: str = EXACT,
    tokenizer: PreTrainedTokenizerBase | None = None,
    language: int | str | None = None,
) -> str:
    """Write a folder that CTranslate2's `Translator` loads and that computes the model's function.

    Branches and paths become one wide attention and one wide feed-forward network. Before the folder gets its final
    name, the engine scores random sentences with the weights in float32. These scores are compared with the model's.

    Args:
        model: a folder, a Hub id, or a loaded model, as `open_model` accepts it. It is not changed.
        folder: where to write; new or empty.
        quantization: CTranslate2's name for the type of the weights. With float32 the function stays exactly the
            same. float16 and bfloat16 halve the folder's size, and int8 makes it a quarter. In int8_float16 and
            similar names the second part is the type of the other numbers.
        tokenizer: the model's tokenizer, required for a loaded model; None: the tokenizer saved with the model.
        language: name or index of the posterior, if a latent-depth model has several. Export each to its own folder.

    Returns:
        The folder.

    Raises:
        UserError: ctranslate2 is not installed; the engine cannot compute the model's function; the folder is in
            use; `quantization` is unknown; or the model cannot be loaded or exported (see `open_model`).
        RuntimeError: the scores of the engine differ from the model's; `folder` is not written then.
    """
    if quantization not in QUANTIZATIONS:
        raise UserError(f"quantization is {quote(quantization)}; accepted: {', '.join(QUANTIZATIONS)}")
    need("ctranslate2", "ctranslate2", "an export to CTranslate2")
    target = Path(folder)
    check_output(target, inputs=[Path(model)] if isinstance(model, str | os.PathLike) else [])
    opened = open_model(model, tokenizer, language)
    opened = opened._replace(model=copy.deepcopy(opened.model).cpu().float().eval())  # as the engine computes
    warn_of_rules(opened.model.generation_config, UNKNOWN_RULES, "CTranslate2")
    if told := other_ranking(opened.model.generation_config):
        logger.warning(told)
    with saving(target), whole_folder(target) as draft:
        if quantization == EXACT:
            _write_engine(opened.model, opened.tokenizer, draft, EXACT)
            difference = _check_scores(draft, opened.model, opened.tokenizer)
        else:
            with tempfile.TemporaryDirectory(dir=draft.parent) as exact:
                _write_engine(opened.model, opened.tokenizer, Path(exact), EXACT)
                difference = _check_scores(Path(exact), opened.model, opened.tokenizer)
            _write_engine(opened.model, opened.tokenizer, draft, quantization)
        opened.save_tokenizer(draft)
        search = copy.deepcopy(opened.model.generation_config)  # `hf-deepwide translate` reads this config
        for name in FIELDS:
            setattr(search, name, getattr(opened.model.config, name, None))
        (draft / GENERATION_CONFIG_NAME).write_text(search.to_json_string(), encoding="utf-8")
        (draft / CARD).write_text(readme(opened), encoding="utf-8")
    logger.info("%s: in float32 its scores differ from the model's by up to %.2g", target, difference)
    return str(target)


def _write_engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, quantization: str) -> None:
    """Write the engine's model, its config and its vocabularies."""
    from .ctranslate2_spec import specification

    spec = specification(model, tokenizer)
    spec.validate()
    spec.optimize(quantization)
    spec.save(str(folder))


def readme(opened: Opened) -> str:
    """Return the folder's README: lines of Python that translate with the settings of the generation config.

    The engine's beam search ends as `generate` with `early_stopping=True` does.
    """
    from .ctranslate2_spec import start_tokens

    model, tokenizer, model_type = opened
    config, settings = model.config, model.generation_config
    languages = Languages(config, settings, tokenizer)
    shown = shown_languages(languages, tokenizer, knows_start=len(start_tokens(config, tokenizer)) == 1)
    options = {
        "beam_size": settings.num_beams or 1,
        **({"length_penalty": settings.length_penalty} if settings.length_penalty not in (None, 1) else {}),
        "max_input_length": config.max_position_embeddings,
        **engine_options(settings, tokenizer, min(opened.longest, config.max_position_embeddings - 1)),
    }
    if isinstance(config.eos_token_id, list):
        options["end_token"] = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    given = [f"{name}={_python(value)}" for name, value in options.items()]
    first, forced = shown.first, settings.forced_bos_token_id
    if first is None and forced is not None:
        first = tokenizer.convert_ids_to_tokens(forced)
    if first is not None:
        given.append(f"target_prefix=[[{literal(first)}]] * len(sources)")
    is_short = len(", ".join(given)) < SHORT
    listed = ", ".join(given) if is_short else "".join(f"\n    {option}," for option in given) + "\n"
    before = shown.tag or shown.source_token
    tag, rest = f"[{literal(before)}] + " if before else "", "[1:]" if shown.source_token else ""
    ranking = f"\n{told}\n" if (told := other_ranking(settings)) else ""
    others = "\nPut the code of another target language into `target_prefix`.\n" if languages.codes else ""
    code = f"""import ctranslate2
from transformers import AutoTokenizer

texts = ["One sentence each, in the source language."]
translator = ctranslate2.Translator(".")  # this folder
tokenizer = AutoTokenizer.from_pretrained("."{shown.arguments})
ids = [tokenizer(text, split_special_tokens=True)["input_ids"] for text in texts]  # in a text, "</s>" is text
sources = [{tag}tokenizer.convert_ids_to_tokens(each){rest} for each in ids]
options = dict({listed})
for result in translator.translate_batch(sources, **options):
    found = tokenizer.convert_tokens_to_ids(result.hypotheses[0])
    print(tokenizer.decode(found, skip_special_tokens=True))
"""
    return (
        "# A translation model for CTranslate2\n\n"
        f"A model of the type `{model_type}`, exported by hf_deepwide. It needs "
        f"`pip install {packages('ctranslate2', tokenizer)}`.\n\n"
        f"```python\n{code}```\n{shown.note}{others}{ranking}"
    )


def other_ranking(settings: GenerationConfig) -> str:
    """Return a note if the engine's beam search ranks translations in another way than `generate`; else "".

    The engine applies rules on tokens before it normalises scores to log-probabilities. `generate` applies them after
    the normalisation.
    """
    rules = ["no_repeat_ngram_size", "suppress_tokens", "bad_words_ids"]
    found = [] if settings.renormalize_logits else [name for name in rules if getattr(settings, name)]
    remedy = "; with `renormalize_logits: true` in the generation config both are alike" if found else ""
    if settings.repetition_penalty not in (None, 1):
        found, remedy = [*found, "repetition_penalty"], ""
    if not found or (settings.num_beams or 1) == 1:
        return ""
    return f"With beams, CTranslate2 ranks translations in another way than `generate`, by {', '.join(found)}{remedy}."


def engine_options(settings: GenerationConfig, tokenizer: PreTrainedTokenizerBase, longest: int) -> dict[str, Any]:
    """Return the settings of a generation config as arguments of `translate_batch`, except beams and languages.

    Args:
        settings: the generation config.
        tokenizer: the model's tokenizer.
        longest: the most tokens that `generate` would make. With `forced_eos_token_id`, the last of them is the forced
            end. The engine forces no end, so its limit is one token less, but at least 1, as it refuses 0.
    """
    ends = settings.eos_token_id
    most = longest if settings.forced_eos_token_id is None else max(longest - 1, 1)
    forbidden = [*(settings.bad_words_ids or []), *([token] for token in settings.suppress_tokens or [])]
    least = settings.min_new_tokens or max((settings.min_length or 0) - 1, 0)  # the engine's default is 1
    options = {
        "max_decoding_length": most,
        "repetition_penalty": settings.repetition_penalty if settings.repetition_penalty not in (None, 1) else None,
        "no_repeat_ngram_size": settings.no_repeat_ngram_size or None,
        "suppress_sequences": [tokenizer.convert_ids_to_tokens(ids) for ids in forbidden] or None,
        "min_decoding_length": min(least, most),
        "end_token": tokenizer.convert_ids_to_tokens(ends) if isinstance(ends, list) else None,
    }
    return {name: value for name, value in options.items() if value is not None}


def _python(value: Any) -> str:
    """Return a value as Python code."""
    return json.dumps(value, ensure_ascii=False)


@torch.no_grad()
def _check_scores(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    """Score the same random sentences with engine and model; return the largest difference of log-probabilities.

    Raises:
        RuntimeError: the difference is larger than `TOLERANCE`.
    """
    import ctranslate2

    from .ctranslate2_spec import start_tokens, vocabulary

    config = model.config
    vocabularies = [vocabulary(tokenizer, size) for size in (config.vocab_size, config.decoder_vocab_size)]
    starts = sorted(start_tokens(config, tokenizer))
    generator = torch.Generator().manual_seed(0)
    longest = min(24, config.max_position_embeddings - 1)
    engine = ctranslate2.Translator(str(folder), compute_type=EXACT)
    worst, largest = 0.0, 1.0
    for length, start in zip((longest, -(-longest // 2), 1), (starts * 3)[:3], strict=True):
        source = torch.randint(config.vocab_size, (1, length), generator=generator)
        target = torch.randint(config.decoder_vocab_size, (1, length), generator=generator)
        decoder_input = torch.cat([torch.tensor([[start]]), target], dim=1)
        logits = model(source.to(model.device), decoder_input_ids=decoder_input.to(model.device)).logits
        expected = logits[0, :length].float().cpu().log_softmax(-1).gather(-1, target[0, :, None])[:, 0]
        words = [
            [tokens[i] for i in ids[0].tolist()] for tokens, ids in zip(vocabularies, (source, target), strict=True)
        ]
        if len(starts) > 1:
            words[1].insert(0, vocabularies[1][start])
        scores = engine.score_batch([words[0]], [words[1]])[0].log_probs[:length]
        worst = max(worst, (torch.tensor(scores) - expected).abs().max().item())
        largest = max(largest, expected.abs().max().item())
    if not worst <= TOLERANCE * largest:
        raise RuntimeError(
            f"CTranslate2 does not compute the model's function: log-probabilities differ by up to {worst:.2g}; "
            "please report this"
        )
    return worst
