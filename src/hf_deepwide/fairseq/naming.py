"""Convert the names and layouts of fairseq's weights to ours.

fairseq has three matrices for queries, keys and values, or one matrix for all (older versions). The MAT fork has a
module for each branch. Our models have three matrices, which hold all branches. Projections into branches are
concatenated by rows, and projections out of branches by columns. Biases are concatenated. No matrix is transposed.
"""

import re
from collections import defaultdict
from collections.abc import Iterator

import torch

from ..errors import UserError, some
from ..loading import LEFT_OUT
from ..vanilla_form import HEAD, Tensors

ATTENTION = re.compile(
    r"(encoder|decoder)\.layers\.(\d+)\.(self_attn|encoder_attn)(?:_branches\.(\d+))?\."
    r"(in|q|k|v|out)_proj[._](weight|bias)"
)
FEED_FORWARD = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(fc1|fc2)(?:_branches\.(\d+))?\.(weight|bias)")
NORM = re.compile(r"((?:encoder|decoder)\.layers\.\d+\.(?:self_attn|encoder_attn|final)_layer_norm\.(?:weight|bias))")
OLD_NORM = re.compile(r"((encoder|decoder)\.layers\.\d+\.)layer_norms\.([012])\.(weight|bias)")
OLD_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}
OTHERS = (  # other weights of a stack
    (re.compile(r"(encoder|decoder)\.(embed_tokens\.weight|layer_norm\.(?:weight|bias))"), r"model.\1.\2"),
    (re.compile(r"(encoder|decoder)\.embed_positions\.weight"), r"model.\1.embeddings.positions.weight"),
    (re.compile(r"(encoder|decoder)\.layernorm_embedding\.(weight|bias)"), r"model.\1.embeddings.layer_norm.\2"),
    (re.compile(r"(encoder|decoder)\.layer_select\.layer_logits"), r"model.\1.layer_selection.layer_logits"),
    (re.compile(r"decoder\.(?:embed_out|output_projection\.weight)"), HEAD),
)
PADDING_ROWS = 2  # rows of learned positions up to the padding id, which no token looks up
ROWS, COLUMNS = 0, 1


def rename(weights: Tensors) -> Tensors:
    """Return fairseq's weights under our names, with all branches of a sub-layer in one tensor.

    Raises:
        UserError: a weight has no place in our models, occurs twice or has a wrong shape; or a branch is missing.
    """
    pieces: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    along: dict[str, int] = {}
    unknown = []
    for name, tensor in weights.items():
        if LEFT_OUT.search(name):
            continue
        found = False
        for key, branch, dim, piece in _places(name, tensor):
            if branch in pieces[key]:
                raise UserError(f"{name} is there twice, under an older and a newer name")
            pieces[key][branch], along[key], found = piece, dim, True
        if not found:
            unknown.append(name)
    if unknown:
        raise UserError(f"it has weights for which our models have no place: {some(unknown)}")
    for key, branches in pieces.items():
        if missing := set(range(len(branches))) - set(branches):
            raise UserError(f"{key}: branch {min(missing)} is missing")
    return {key: _join([branches[i] for i in range(len(branches))], along[key]) for key, branches in pieces.items()}


def one_of_many(weights: Tensors) -> tuple[Tensors, list[str]]:
    """Return the weights of one language pair of a multilingual model, and the names of all pairs.

    fairseq saves the whole model for each pair, as `models.en-de.…`. If encoders and decoders are shared, all these
    models are the same. For any other model, return its weights and no pairs.

    Raises:
        UserError: the weights of the pairs differ.
    """
    by_pair: dict[str, Tensors] = defaultdict(dict)
    for name, tensor in weights.items():
        if match := re.fullmatch(r"models\.([^.-]+-[^.-]+)\.(.+)", name):
            by_pair[match[1]][match[2]] = tensor
    if not by_pair:
        return weights, []
    first = next(iter(by_pair.values()))
    for pair, theirs in by_pair.items():
        differs = [
            name
            for name in {**first, **theirs}
            if name not in first or name not in theirs or not torch.equal(first[name], theirs[name])
        ]
        if differs or sum(map(len, by_pair.values())) != len(weights):
            raise UserError(
                f"its language pairs have weights of their own ({pair}: {some(differs) or 'others'}); accepted are "
                "models that were trained with --share-encoders and --share-decoders"
            )
    return first, list(by_pair)


def _places(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """Yield the places of a weight: our name, its branch, the dimension that joins branches, and the tensor."""
    if match := ATTENTION.fullmatch(name):
        stack, layer, attention, branch, projection, part = match.groups()
        prefix = f"model.{stack}.layers.{layer}.{attention}"
        dim = COLUMNS if projection == "out" and part == "weight" else ROWS
        if projection == "in":
            for letter, third in zip("qkv", _thirds(name, tensor), strict=True):
                yield f"{prefix}.{letter}_proj.{part}", int(branch or 0), dim, third
        else:
            yield f"{prefix}.{projection}_proj.{part}", int(branch or 0), dim, tensor
    elif match := FEED_FORWARD.fullmatch(name):
        stack, layer, linear, branch, part = match.groups()
        dim = COLUMNS if linear == "fc2" and part == "weight" else ROWS
        yield f"model.{stack}.layers.{layer}.feed_forward.{linear}.{part}", int(branch or 0), dim, tensor
    elif match := NORM.fullmatch(name):
        yield f"model.{match[1]}", 0, ROWS, tensor
    elif match := OLD_NORM.fullmatch(name):
        prefix, stack, number, part = match.groups()
        norms = OLD_NORMS[stack]
        if int(number) < len(norms):
            yield f"model.{prefix}{norms[int(number)]}.{part}", 0, ROWS, tensor
    else:
        for pattern, ours in OTHERS:
            if match := pattern.fullmatch(name):
                positions = name.endswith("embed_positions.weight")
                yield match.expand(ours), 0, ROWS, tensor[PADDING_ROWS:] if positions else tensor


def _thirds(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split one matrix or bias into those of queries, keys and values."""
    if tensor.dim() == 0 or len(tensor) % 3:
        raise UserError(f"{name} has the shape {list(tensor.shape)}, which is not three matrices")
    return tensor.chunk(3)


def _join(branches: list[torch.Tensor], dim: int) -> torch.Tensor:
    if len(branches) == 1:
        return branches[0]
    try:
        return torch.cat(branches, dim)
    except (RuntimeError, IndexError) as error:
        raise UserError(f"branches have shapes that differ: {[list(b.shape) for b in branches]}") from error
