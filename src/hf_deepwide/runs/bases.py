"""The config fields that a run may change when its base has the same family.

A base of another family is converted by `warm_start`, which has the same rules: the weights were trained for one
function, and must keep it. Fields that act only in training may change.
"""

from typing import Any

from transformers import PreTrainedConfig

from ..data.arguments import DataArguments
from ..errors import UserError, quote
from ..families import family_of
from ..vanilla_form import JOINTS
from ..warm_start import POSTERIORS, TOKEN_IDS
from .averaging import FREE as TRAINING

FREE = {
    *TRAINING,
    *TOKEN_IDS,
    *POSTERIORS,
    "max_position_embeddings",  # loading compares the shapes of learned positions
    # how latent depth samples in training, and the fields that depend on the samples
    *("gumbel_temperature", "final_temperature", "inference_selection"),
    # fields of Transformers' own classes: rates, losses, labels, returned values, and how outputs begin and end
    *("dropout_rate", "classifier_dropout_rate", "moe_token_dropout", "seq_classif_dropout", "qa_dropout"),
    *("hidden_dropout", "embedding_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop", "pooler_dropout"),
    *("initializer_factor", "router_jitter_noise", "router_z_loss_coef", "router_aux_loss_coef", "add_router_probs"),
    *("output_router_logits", "output_hidden_states", "output_attentions", "return_dict", "eps", "disable_ngram_loss"),
    *("chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type"),
    *("forced_bos_token_id", "forced_eos_token_id", "num_beams", "length_penalty", "early_stopping", "max_length"),
}


def check_base_fields(prefix: str, base: PreTrainedConfig, fields: dict[str, Any]) -> None:
    """Refuse fields that differ from the base's and would make its weights compute another function.

    Args:
        prefix: start of the error messages.
        base: the base's config.
        fields: the config fields that the recipe sets.

    Raises:
        UserError: a field differs. The message names the field and the base's value.
    """
    for field, value in differing(base, fields).items():
        have = getattr(base, field, None)
        is_named = field == "pad_token_id" and have is None  # a base that was trained without padding
        if field not in FREE and not is_named and not _is_added(base, field, value):
            raise UserError(
                f"{prefix}: model.{field} cannot be {quote(value)}: the base has {quote(have)}, and its weights were "
                "trained with that; leave it out"
            )


def check_posteriors(prefix: str, base: PreTrainedConfig, names: list[str]) -> None:
    """Refuse names of posteriors that would give the weights of one posterior to another.

    The same check holds for the names of languages that have weights of their own.

    Args:
        prefix: start of the error messages.
        base: the base's config.
        names: names of the recipe's posteriors, in the order of their indices; [] for none.

    Raises:
        UserError: the base has several posteriors, and the recipe names none; or the recipe's names or their order
            differ from the base's.
    """
    theirs, count = getattr(base, "posterior_names", None), getattr(base, "num_posteriors", 1)
    if count > 1 and not names:
        raise UserError(
            f"{prefix}: the base has {count} posteriors ({', '.join(theirs or ['without names'])}), and nothing tells "
            "which of them a sentence uses; set data.posteriors, and data.pairs of a translation model. To go on with "
            "one posterior of a latent-depth model, start from the result of `hf-deepwide prune`"
        )
    if theirs and names and names != list(theirs):
        raise UserError(
            f"{prefix}: data.posteriors: the posteriors of the recipe are {', '.join(names)}, and those of the base "
            f"are {', '.join(theirs)}, in this order. The weights of each would go to another; name the same "
            "languages, in the order of the base"
        )


def check_tags(prefix: str, base: PreTrainedConfig, data: DataArguments) -> None:
    """Refuse to give a base the target language in another way than in its training.

    Raises:
        UserError: the base was trained with a tag at the start of its sources or decoder inputs, and the recipe puts
            no tag there.
    """
    pairs = getattr(base, "translation_pairs", None) or {}
    told = {key: value for settings in pairs.values() for key, value in settings.items()}
    asked = data.language_tag if data.pairs is not None else "source"  # a single pair gets the tag that is there
    ways = (("source", "tag", "before the source"), ("decoder", "decoder_start_token_id", "as the decoder's first"))
    for tag, key, place in ways:
        if key in told and asked != tag:
            raise UserError(
                f"{prefix}: data.language_tag is {quote(asked)}, and the base was trained with the tag of the target "
                f"language {place}; set data.pairs, of one pair or more, and data.language_tag: {tag}"
            )


def adds_weights(base: PreTrainedConfig, fields: dict[str, Any]) -> bool:
    """Return whether fields join the base's layers with weights that the base does not have."""
    return any(field in JOINTS for field in differing(base, fields))


def differing(base: PreTrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields whose values differ from the base's."""
    defaults = {"decoder_vocab_size": getattr(base, "vocab_size", None)}
    asked = {field: defaults.get(field) if value is None else value for field, value in fields.items()}
    return {field: value for field, value in asked.items() if getattr(base, field, None) != value}


def _is_added(base: PreTrainedConfig, field: str, value: Any) -> bool:
    """Return whether a field adds joints that keep a plain base's function at first, or is an option of these."""
    family = family_of(type(base))
    plain = {joint: getattr(type(base), joint) for joint in JOINTS if hasattr(type(base), joint)}
    if family is None or differing(base, plain):
        return False
    return value in family.start.neutral.get(field, ()) or (bool(family.start.neutral) and field in family.start.free)
