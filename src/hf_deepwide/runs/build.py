"""Make a model from a recipe and a tokenizer: new, from a base of another family, or from a checkpoint."""

import logging
from typing import Any

import psutil
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from .. import checkpoint_files
from ..data.languages import set_codes, tag_of, translation_pairs
from ..data.new_languages import start_embeddings
from ..data.tokenizer import check_tokenizer
from ..errors import UserError, one_line, prefixed, quote
from ..families import family_of
from ..loading import load_config, load_model, load_tokenizer
from ..models.configuration_base import DeepWideConfig
from ..models.language_pairs import language_ids, target_vocabulary
from ..models.plain_text import positions
from ..models.saved_fields import LIMITS
from ..models.word_tokenizer import WordTokenizer
from ..training.arguments import TranslationTrainingArguments
from ..vanilla_form import check_base_config
from .bases import adds_weights, check_base_fields, check_posteriors, check_tags
from .recipe import Recipe

logger = logging.getLogger(__name__)

SAMPLING = {"gumbel_temperature", "final_temperature", "soft_selection_steps"}  # how latent depth draws its layers
# Search settings that a recipe cannot set.
RULES = (
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "min_length",
    "min_new_tokens",
    "repetition_penalty",
    "encoder_repetition_penalty",
)


def build_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, args: TranslationTrainingArguments
) -> PreTrainedModel:
    """Build the model that a run starts with; `args.seed` determines the weights that are drawn at random.

    The weights are in float32, even if a base was saved in another dtype. Autocast rounds only the operands of
    products; Adam updates the float32 weights. The generation config holds the recipe's beam search, so that every
    checkpoint translates as it was scored. The config of a multilingual model holds the settings of each language
    pair (`models/language_pairs.py`).

    Raises:
        UserError: fields that contradict the tokenizer or the base; a base that cannot be loaded or converted.
    """
    set_seed(args.seed)
    attention = {"attn_implementation": args.attn_implementation}
    if recipe.init_from is None:
        config = new_config(recipe, tokenizer)
        check_memory(config, recipe.source)
        try:
            model = AutoModelForSeq2SeqLM.from_config(config, **attention)
        except (ValueError, ImportError, RuntimeError) as error:  # RuntimeError: more memory than there is
            raise UserError(f"{recipe.source}: model: it cannot be made: {one_line(error)}") from error
    else:
        check_same_tokens(recipe, tokenizer)
        model = _from_checkpoint(recipe)
        rows = model.config.vocab_size
        model.set_attn_implementation(args.attn_implementation)
        if recipe.tokenizer.new_languages:
            start_embeddings(model, tokenizer, recipe.tokenizer.new_languages)
        if (recipe.data.pairs or recipe.data.synthetic_tag) and len(tokenizer) > model.config.vocab_size:
            model.resize_token_embeddings(len(tokenizer))  # for tags that the base does not have
        _warn_of_rows(recipe, tokenizer, range(rows, model.config.vocab_size))
        _forget_rules(model, recipe)
    codes = set_codes(tokenizer, recipe.data)
    if "decoder_start_token_id" in codes:
        model.config.decoder_start_token_id = codes["decoder_start_token_id"]
    check_tokenizer(tokenizer, model.config)
    pairs = translation_pairs(recipe.data, tokenizer)
    if pairs or hasattr(model.config, "translation_pairs"):
        model.config.translation_pairs = pairs or None  # never the pairs of a base
    one_pair = not recipe.data.pairs and not codes
    if codes:  # for cards: the tokenizer also has codes of languages that the run did not train
        model.config.trained_pairs = ["-".join(pair) for pair in recipe.data.language_pairs]
    model.config.source_lang = recipe.data.source_lang if one_pair else None
    model.config.target_lang = recipe.data.target_lang if one_pair else None
    model.generation_config.update(
        # Training had no longer sentences, and the model has no positions for them.
        max_length=min(recipe.data.max_length, positions(model.config) or recipe.data.max_length),
        **codes,
    )
    set_search(model, recipe)
    return model.float()


def _warn_of_rows(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, rows: range) -> None:
    """Warn if embeddings were added for tokens other than the tags and the new languages of the run."""
    tags = [recipe.data.synthetic_tag, *(tag_of(target, tokenizer) for _, target in recipe.data.language_pairs)]
    ids = {**tokenizer.get_vocab(), **language_ids(tokenizer)}
    meant = {ids.get(token) for token in (*tags, *recipe.tokenizer.new_languages)}
    if count := len({*rows} - meant):
        logger.warning(
            "the tokenizer %s has tokens that the base %s has no embeddings for: %d rows were added, and start at "
            "random", recipe.tokenizer.path, recipe.init_from, count,
        )  # fmt: skip


def _forget_rules(model: PreTrainedModel, recipe: Recipe) -> None:
    """Reset the search settings of a base that suit its own task, such as no repeated phrase in a summary."""
    generation = model.generation_config
    found = {name: getattr(generation, name, None) for name in RULES}
    if rules := {name: value for name, value in found.items() if value not in (None, 0, 1)}:  # no effect
        generation.update(**dict.fromkeys(rules))
        logger.warning(
            "the base %s searches with %s, and the run does not: it searches as the section evaluation says",
            recipe.init_from, ", ".join(f"{name} {value}" for name, value in rules.items()),
        )  # fmt: skip


def set_search(model: PreTrainedModel, recipe: Recipe) -> bool:
    """Set a model's search to the recipe's section `evaluation`; return True if this changed a setting.

    `generate` reads the generation config. A generation config would lose the limits of length, so the model's config
    holds them. The translation pipeline and `translate` read the limits there.
    """
    evaluation, beams = recipe.evaluation, recipe.evaluation.num_beams > 1
    own = {
        "num_beams": evaluation.num_beams,
        "length_penalty": evaluation.length_penalty if beams else None,
        "early_stopping": evaluation.early_stopping if beams else None,
    }
    changed = False
    for config, fields in (
        (model.generation_config, own),
        (model.config, {name: getattr(evaluation, name) for name in LIMITS}),
    ):
        for name, value in fields.items():
            changed |= getattr(config, name, None) != value
            setattr(config, name, value)
    return changed


def check_memory(config: PreTrainedConfig, source: str) -> None:
    """Refuse a model whose weights alone need more memory than the machine has, before the memory is allocated.

    Raises:
        UserError: the weights do not fit. The message starts with `source`.
    """
    if isinstance(config, DeepWideConfig):
        least = config.least_parameters
    else:  # each layer of a Transformer has at least the four matrices of an attention
        layers = getattr(config, "num_hidden_layers", 0)
        least = config.hidden_size * (config.vocab_size + 4 * layers * config.hidden_size)
    needed, there = 4 * least, psutil.virtual_memory().total + psutil.swap_memory().total
    if needed > there:
        raise UserError(
            f"{source}: model: its weights take {needed / 2**30:,.0f} GiB or more, and the machine has "
            f"{there / 2**30:,.0f} GiB; lower model.d_model, the number of layers, or tokenizer.vocab_size"
        )


def new_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The config of a new model: the recipe's fields, and the token ids and vocabulary size of the tokenizer."""
    cls = CONFIG_MAPPING[recipe.family]
    given = recipe.model_fields
    origins = {"tokenizer": _from_tokenizer(tokenizer, cls()), "section data": posterior_fields(recipe)}
    for origin, decided in origins.items():
        for key, value in decided.items():
            if given.get(key, value) != value:
                raise UserError(
                    f"{recipe.source}: model.{key}: {quote(given[key])} contradicts the {origin}, whose {key} is "
                    f"{quote(value)}; leave it out"
                )
    fields = given | origins["tokenizer"] | origins["section data"]
    try:
        return AutoConfig.for_model(recipe.family, **fields)
    except (ValueError, StrictDataclassError) as error:
        raise UserError(f"{recipe.source}: model: {one_line(error, 400)}") from error


def posterior_fields(recipe: Recipe) -> dict[str, Any]:
    """The config fields that `data.posteriors` decides: the number of posteriors or languages, and their names."""
    names = recipe.data.posterior_names
    if not names:
        _check_prior(recipe)
        if recipe.model_fields.get("language_aware") and getattr(recipe.data, "pairs", None):
            raise UserError(
                f"{recipe.source}: model.language_aware: true gives each language its own norms, but data.posteriors "
                "is none; set data.posteriors to target, source or pair"
            )
        return {}
    family = family_of(CONFIG_MAPPING[recipe.family])
    if family is None or not family.has_posteriors:
        raise UserError(
            f"{recipe.source}: data.posteriors: a model of the family {recipe.family} has none; set it to none"
        )
    return {"num_posteriors": len(names), "posterior_names": names}


def _check_prior(recipe: Recipe) -> None:
    """Refuse the aggregated prior with a single posterior: the two are equal, so the KL divergence is always 0."""
    fields = {"layer_prior": "uniform", "kl_estimator": "analytic", "num_posteriors": 1, **recipe.model_fields}
    if (fields["layer_prior"], fields["kl_estimator"], fields["num_posteriors"]) == ("aggregated", "analytic", 1):
        raise UserError(
            f"{recipe.source}: model.layer_prior: aggregated is the mean of the posteriors of several languages, and "
            "there is one posterior; set data.pairs and data.posteriors, or model.layer_prior to uniform or beta"
        )


def _from_tokenizer(tokenizer: PreTrainedTokenizerBase, defaults: PreTrainedConfig) -> dict[str, Any]:
    """Fields of the config that the tokenizer decides.

    Decoders begin with `</s>`, as in fairseq. In families whose own models begin with padding (Marian), decoders begin
    with padding. The same holds for families whose config has no such field (T5): its checkpoints name the padding.
    """
    begins_with_padding = getattr(defaults, "decoder_start_token_id", defaults.pad_token_id) == defaults.pad_token_id
    fields = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id if begins_with_padding else tokenizer.eos_token_id,
    }
    if getattr(defaults, "forced_eos_token_id", None) is not None:
        fields["forced_eos_token_id"] = tokenizer.eos_token_id
    if isinstance(tokenizer, WordTokenizer):
        if not hasattr(defaults, "decoder_vocab_size"):
            raise UserError(
                f"tokenizer.words makes two vocabularies, and a {defaults.model_type} model has one for both sides; "
                "choose another model.family"
            )
        fields |= {"decoder_vocab_size": tokenizer.target_vocab_size, "share_encoder_decoder_embeddings": False}
    return fields


def check_same_tokens(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a tokenizer gives the base's tokens the same ids as the base's tokenizer, on both sides.

    The tokenizer may have further tokens.

    Raises:
        UserError: an id differs, so that a token would get the embedding of another token.
    """
    base, path = str(recipe.init_from), str(recipe.tokenizer.path)
    if base == path or not has_tokenizer(base):
        return
    sides = (
        (vocabulary, target_vocabulary(each) or vocabulary)
        for each in (tokenizer, load_tokenizer(base))
        for vocabulary in [each.get_vocab()]
    )
    for ours, theirs in zip(*sides, strict=True):
        for token, number in theirs.items():
            if ours.get(token) != number:
                raise UserError(
                    f"{recipe.source}: tokenizer.path {quote(path)} is not the tokenizer of the base, model.init_from "
                    f"{quote(base)}: there the token {quote(token)} has the id {number}, and here {ours.get(token)}. "
                    f"Set tokenizer.path to {quote(base)}"
                )


def has_tokenizer(base: str) -> bool:
    """Return True if a folder, or a model on the Hub, has a tokenizer beside its weights."""
    return checkpoint_files.find(base, "tokenizer_config.json") is not None


def new_rows(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of tokens that the base does not have: codes of new languages, and tags."""
    base = str(recipe.init_from)
    theirs, ours = (
        {**each.get_vocab(), **language_ids(each)}
        for each in (load_tokenizer(base if has_tokenizer(base) else str(recipe.tokenizer.path)), tokenizer)
    )
    return sorted({ours[token] for token in ours.keys() - theirs.keys()})


def _from_checkpoint(recipe: Recipe) -> PreTrainedModel:
    """Load the checkpoint `init_from`: as it is, if it has the family and all weights, else with `from_base`."""
    base, fields = recipe.init_from, recipe.model_fields | posterior_fields(recipe)
    prefix = f"{recipe.source}: model.init_from {quote(base)}"
    theirs = check_base(recipe)
    cls = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[CONFIG_MAPPING[recipe.family]]
    try:
        with prefixed(f"{prefix}: "):
            # `from_base` initialises new joints so that the base's layers keep their function
            if theirs.model_type != recipe.family or adds_weights(theirs, fields):
                return cls.from_base(base, **fields)
            model = load_model(cls, base, prefix, **fields)
            if fields.keys() & SAMPLING and "inference_selection" not in fields:
                # the base's selection fits the samples of its own training, perhaps not those of this recipe
                model.config.inference_selection = model.config.trained_selection
            return model
    except UserError:
        raise
    except (ValueError, StrictDataclassError) as error:
        raise UserError(f"{prefix}: {one_line(error, 400)}") from error


def check_base(recipe: Recipe) -> PreTrainedConfig:
    """Check by its config that the base `init_from` can become the recipe's model; return the config.

    Raises:
        UserError: the base cannot become this model, or there is no such base.
    """
    base = str(recipe.init_from)
    prefix = f"{recipe.source}: model.init_from {quote(base)}"
    theirs = load_config(base, prefix)
    check_posteriors(prefix, theirs, recipe.data.posterior_names)
    check_tags(prefix, theirs, recipe.data)
    if theirs.model_type == recipe.family:
        check_base_fields(prefix, theirs, recipe.model_fields)
    elif not hasattr(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[CONFIG_MAPPING[recipe.family]], "from_base"):
        raise UserError(f"{prefix}: a {theirs.model_type} model cannot be made into a {recipe.family} model")
    else:
        with prefixed(f"{prefix}: "):
            check_base_config(repr(base), theirs)
    return theirs
