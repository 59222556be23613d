"""Configuration of the Multi-Path Transformer."""

from .configuration_base import LAYERS, WEIGHT, DeepWideConfig, check_bounds, validated
from .quoting import quote


@validated
class MultiPathConfig(DeepWideConfig):
    """The Multi-Path Transformer (Lin et al. 2023): a multi-path encoder and a standard pre-norm decoder.

    The defaults are the paper's "6 x 4 + more features" with its base sizes. Its other systems, as fields:

    | system | fields |
    |---|---|
    | Transformer-base, Transformer-deep | `encoder_paths=1, path_norm=False, learnable_path_weights=False` |
    | original multi-path (fixed 1/n) | `path_norm=False, learnable_path_weights=False, more_features=False` |
    | + PathNorm (fixed 1/sqrt(n)) | `learnable_path_weights=False, more_features=False` |
    | learnable weights alone | `path_norm=False, more_features=False` |
    | + both ("Ours") | `more_features=False` |
    | + more features | the defaults |

    Args:
        encoder_paths: n, the number of attentions, or of feed-forward networks, side by side in an encoder sub-layer.
        path_norm: a LayerNorm on each feature (Eq. 5).
        learnable_path_weights: learn alpha, the weight of each feature, and beta, the weight of the residual (Eq. 4);
            otherwise both are fixed.
        more_features: with three or more paths, add the n averages of all paths but one (section 3.2).
        path_weight_init: the initial alpha, or the fixed alpha. None is the paper's rule: 1/sqrt(2n) for learnable
            weights on normalised features (section 3.3), and 1/sqrt(n) for fixed weights on normalised features.
            Without PathNorm alpha is 1 / (number of features) (section 5.2).

    Raises:
        ValueError: a field has a wrong type, is out of range, or contradicts another.
    """

    model_type = "multipath_transformer"

    normalize_before: bool = True
    encoder_paths: int = 4
    path_norm: bool = True
    learnable_path_weights: bool = True
    more_features: bool = True
    path_weight_init: float | int | None = None

    @property
    def path_features(self) -> int:
        """The number of features that each sub-layer sums: n outputs of paths, and with `more_features` n averages.

        There are no averages if n < 3.
        """
        return self.encoder_paths * (2 if self.more_features and self.encoder_paths >= 3 else 1)

    @property
    def initial_path_weight(self) -> float:
        """The initial alpha; see `path_weight_init`."""
        if self.path_weight_init is not None:
            return float(self.path_weight_init)
        if not self.path_norm:
            return 1 / self.path_features
        return (self.encoder_paths * (2 if self.learnable_path_weights else 1)) ** -0.5

    @property
    def least_parameters(self) -> int:
        """The parent's bound with all paths of the encoder."""
        path = self.d_model * (4 * self.d_model + 2 * self.encoder_ffn_dim)
        return super().least_parameters + self.encoder_layers * (self.encoder_paths - 1) * path

    def validate_paths(self) -> None:
        """Check that there is at least one path, and that no field of branches is set, because paths replace them."""
        check_bounds(self, 1, LAYERS, "encoder_paths")
        check_bounds(self, 0, WEIGHT, "path_weight_init", above=True)
        for name in ("attention_branches", "ffn_branches"):
            if getattr(self, name) != 1:
                raise ValueError(f"`{name}` must be 1: the width here is `encoder_paths`, got {getattr(self, name)}")
        for name in ("drop_branch", "ffn_drop_branch"):
            if getattr(self, name):
                raise ValueError(f"`{name}` must be 0: paths are never dropped, got {getattr(self, name)}")
        for name in ("join_ffn", "drop_unit", "drop_granularity", "branch_merge"):
            default, value = getattr(type(self), name), getattr(self, name)
            if value != default:
                raise ValueError(
                    f"`{name}` must be {default!r}: there is one branch and nothing is dropped, got {quote(value)}"
                )
