"""From a recipe and a tokenizer to a model: new, from a base of another family, or a checkpoint to go on from."""

import logging
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from ..data.tokenizer import check_tokenizer
from ..errors import UserError
from .arguments import TranslationTrainingArguments
from .recipe import Recipe, config_class

logger = logging.getLogger(__name__)


def build_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, args: TranslationTrainingArguments
) -> PreTrainedModel:
    """The model that a run starts with; its weights, where they are drawn, follow from `args.seed`.

    Its generation config holds the recipe's beam search, so that every checkpoint translates as it was scored.

    Raises:
        UserError: fields that contradict the tokenizer or the base; a base that cannot be loaded or expressed.
    """
    set_seed(args.seed)
    attention = {"attn_implementation": args.attn_implementation}
    if recipe.init_from is None:
        model = AutoModelForSeq2SeqLM.from_config(new_config(recipe, tokenizer), **attention)
    else:
        model = _from_checkpoint(recipe, tokenizer)
        model.set_attn_implementation(args.attn_implementation)
    check_tokenizer(tokenizer, model.config)
    beams = recipe.evaluation.num_beams
    model.generation_config.update(
        num_beams=beams,
        length_penalty=recipe.evaluation.length_penalty if beams > 1 else None,
        early_stopping=recipe.evaluation.early_stopping if beams > 1 else None,
        max_length=recipe.data.max_length,  # nothing longer was trained on
    )
    return model


def new_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The config of a new model: the recipe's fields, and ids and vocabulary of the tokenizer."""
    cls = config_class(recipe.family)
    given = recipe.model_fields
    fields = given | _from_tokenizer(tokenizer, cls())
    for key, value in given.items():
        if fields[key] != value:
            raise UserError(
                f"{recipe.source}: model.{key}: {value!r} contradicts the tokenizer, whose {key} is {fields[key]!r}; "
                "leave it out"
            )
    try:
        return AutoConfig.for_model(recipe.family, **fields)
    except (ValueError, StrictDataclassError) as error:
        raise UserError(f"{recipe.source}: model: {' '.join(str(error).split())}") from error


def _from_tokenizer(tokenizer: PreTrainedTokenizerBase, defaults: PreTrainedConfig) -> dict[str, Any]:
    """Fields of the config that the tokenizer decides.

    Decoders begin with `</s>`, as in fairseq; in families whose own models begin with padding (Marian), with that.
    """
    begins_with_padding = defaults.decoder_start_token_id == defaults.pad_token_id
    fields = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id if begins_with_padding else tokenizer.eos_token_id,
    }
    if getattr(defaults, "forced_eos_token_id", None) is not None:
        fields["forced_eos_token_id"] = tokenizer.eos_token_id
    return fields


def _from_checkpoint(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The checkpoint `init_from`, as it is if it is of the family, else converted by the family's `from_base`."""
    base = recipe.init_from
    try:
        found = AutoConfig.from_pretrained(base).model_type
        cls = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[config_class(recipe.family)]
        if found == recipe.family:
            return cls.from_pretrained(base, **recipe.model_fields)
        if not hasattr(cls, "from_base"):
            raise ValueError(f"a {found} model cannot be made into a {recipe.family} model")
        return cls.from_base(base, **recipe.model_fields)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UserError(f"{recipe.source}: model.init_from {base!r}: {' '.join(str(error).split())}") from error
