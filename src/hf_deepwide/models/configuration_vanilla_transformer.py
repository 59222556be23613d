"""Configuration of the vanilla Transformer."""

from typing import Literal

from .configuration_base import (
    ENTRIES,
    LAYERS,
    WIDTH,
    DeepWideConfig,
    check_bounds,
    check_posterior_fields,
    check_rates,
    check_used,
    validated,
)
from .quoting import quote

KERNEL = 10_000  # the widest kernel that is accepted; a wider one must be a mistake
CELL_SLOTS = 4  # cache slots of a decoder cell of the Evolved Transformer: two attentions and two convolutions
KERNEL_SIZES = [3, 7, 15, 31]  # the widths in the paper of dynamic convolutions
# Options of one way to join or build layers: the field that chooses the way, and the values with this option.
USED_WITH = {
    "aggregation_dilation": ("layer_aggregation", ("denseformer",)),
    "aggregation_period": ("layer_aggregation", ("denseformer",)),
    "routing_capsules": ("layer_aggregation", ("em_routing",)),
    "routing_iterations": ("layer_aggregation", ("em_routing",)),
    "attention_block": ("residual", ("attention",)),
    "residual_streams": ("residual", ("hyper", "mhc")),
    "dynamic_streams": ("residual", ("hyper",)),
    "sinkhorn_iterations": ("residual", ("mhc",)),
    "luna_length": ("layer_form", ("luna",)),
    "luna_tie_kv": ("layer_form", ("luna",)),
    "luna_activation": ("layer_form", ("luna",)),
    "encoder_kernel_sizes": ("layer_form", ("dynamic_convolution",)),
    "decoder_kernel_sizes": ("layer_form", ("dynamic_convolution",)),
}


@validated
class VanillaTransformerConfig(DeepWideConfig):
    """The Transformer of Vaswani et al. (2017): the baseline of every table.

    The defaults are the paper's base model (D 512, F 2048, 8 heads, 6 + 6 layers, post-norm). `DeepWideConfig`
    explains the shared fields. The other fields choose published methods for deep stacks:

    Args:
        layer_drop: LayerDrop (Fan, Grave and Joulin 2020): the probability of skipping a whole layer in training, in
            both stacks. Skipped layers are not computed, and the other layers are not rescaled.
        residual: how a sub-layer F is joined to its input x. `"add"`: x + F(x), with LayerNorms. `"rezero"`
            (Bachlechner et al. 2021): x + a F(x), with one learned weight a per layer that starts at 0, and without
            LayerNorms. `"deepnorm"` (Wang et al. 2022): LN(alpha x + F(x)), and smaller initial weights; both use
            constants that depend on the two depths. `"b2t"` (Takase et al. 2023): post-norm, and the input of a layer
            is added again before the layer's last norm. The next three are pre-norm, and a new model equals the plain
            stack. `"attention"` (Kimi 2026): F reads a learned mixture of all outputs before it. `"hyper"` (Zhu et al.
            2024): F reads and writes several residual streams. `"mhc"` (DeepSeek 2025): the same with bounded weights.
            `"sdu"` (Chai et al. 2020), pre- or post-norm: the output of a gated unit is added beside each sub-layer.
        layer_aggregation: None, or a way to combine the outputs of layers. `"dlcl"` (Wang et al. 2019): each layer's
            input is a learned linear combination, with LayerNorms, of the embeddings and of all earlier outputs.
            `"denseformer"` (Pagliardini et al. 2024): the same without norms; a new model equals the plain stack.
            `"transparent"` (Bapna et al. 2018): each decoder layer reads its own learned mean of all outputs of the
            encoder. In the last three the output of a stack is a combination of its layers. `"iterative"` and
            `"hierarchical"` (Dou et al. 2018) use feed-forward networks on pairs of outputs, in a chain or a tree.
            `"em_routing"` (Dou et al. 2019) uses votes that are weighed at each position.
        aggregation_dilation: n of DenseFormer: the sum after layer l takes only every n-th output, back from y_l.
        aggregation_period: n of DenseFormer: a sum follows only every n-th layer.
        routing_capsules: N of `"em_routing"`, which divides D; None: D capsules of one feature.
        routing_iterations: how often `"em_routing"` weighs the votes.
        encoder_solver: None, or `"rk2"` (Li et al. 2022): each encoder layer is evaluated twice, and a learned gate
            weighs the two terms that are added to the layer's input.
        attention_block: the number of layers whose sum is one source of attention residuals. None: the output of each
            sub-layer is a source.
        residual_streams: n, the number of streams of `"hyper"` and `"mhc"`.
        dynamic_streams: whether the weights of `"hyper"` also depend on the streams themselves, at each position.
        sinkhorn_iterations: how often `"mhc"` normalises the columns of a mixing matrix.
        decoder_attention: `"separate"`, or `"merged"` (Zhang et al. 2019): a decoder layer has one attention, to the
            source, and adds the mean of the values of the target so far.
        layer_form: which sub-layers a layer is made of. `"transformer"`: attention and feed-forward. Other forms have
            plain residual connections. `"weighted"` (Ahmed et al. 2017): each head has a feed-forward network of its
            own, and learned weights scale the network's input and output. The inner width is the sum over all heads.
            `"luna"` (Ma et al. 2021): each attention packs the sequence that it attends to into a short sequence of
            fixed length, and reads the short sequence.
            `"dynamic_convolution"` (Wu et al. 2019): convolutions replace self-attention, and each token predicts its
            kernels. `"evolved"` (So et al. 2019), pre-norm: a layer is a cell of the Evolved Transformer, with
            convolutions and up to four attentions.
        luna_length: l, the length of Luna's packed sequence.
        luna_tie_kv: whether Luna's attentions use their keys as values.
        luna_activation: the function that replaces the softmax in Luna's causal attention, because a softmax would
            see later tokens. `"softplus"`: log2(1 + 2^x), as in the released code; or `"elu"`: elu(x) + 1.
        encoder_kernel_sizes, decoder_kernel_sizes: the widths of the kernels of dynamic convolutions, from the first
            layer up. All further layers have the last width. None: 3, 7, 15 and 31.
        language_aware: whether each language has norms of its own, and a matrix after the encoder (Zhang et al.
            2020, LALN and LALT). Post-norm.
        num_posteriors: N, the number of languages of a language-aware model. With several languages, `forward` and
            `generate` take the argument `posteriors`: the index of each sentence's language. The name is taken from
            latent depth.
        posterior_names: a name for each language, e.g. `["de", "fr", "cs"]`.
        initialization: `"xavier"`: the papers' initial weights. `"lipschitz"` (Xu et al. 2020): uniform within
            sqrt(1 / inputs) for projections, and within sqrt(2 / (D + V)) for embeddings. `"depth_scaled"` (Zhang et
            al. 2019): the initial projections of layer l are multiplied by l^(-1/2).

    Raises:
        ValueError: a field has a wrong type, is out of range, or contradicts another.
    """

    model_type = "vanilla_transformer"

    layer_drop: float | int = 0.0
    residual: Literal["add", "rezero", "deepnorm", "b2t", "attention", "hyper", "mhc", "sdu"] = "add"
    layer_aggregation: (
        Literal["dlcl", "denseformer", "transparent", "iterative", "hierarchical", "em_routing"] | None
    ) = None
    aggregation_dilation: int = 1
    aggregation_period: int = 1
    routing_capsules: int | None = None
    routing_iterations: int = 3
    encoder_solver: Literal["rk2"] | None = None
    attention_block: int | None = None
    residual_streams: int = 4
    dynamic_streams: bool = True
    sinkhorn_iterations: int = 20
    decoder_attention: Literal["separate", "merged"] = "separate"
    layer_form: Literal["transformer", "weighted", "luna", "dynamic_convolution", "evolved"] = "transformer"
    luna_length: int = 32
    luna_tie_kv: bool = False
    luna_activation: Literal["softplus", "elu"] = "softplus"
    encoder_kernel_sizes: list[int] | None = None
    decoder_kernel_sizes: list[int] | None = None
    language_aware: bool = False
    num_posteriors: int = 1
    posterior_names: list[str] | None = None
    initialization: Literal["xavier", "lipschitz", "depth_scaled"] = "xavier"

    @property
    def memory_width(self) -> int:
        """The parent's number; with transparent attention each decoder layer reads its own d_model features."""
        return self.d_model * (self.decoder_layers if self.layer_aggregation == "transparent" else 1)

    def kernel_sizes(self, is_decoder: bool) -> list[int]:
        """Return the width of the dynamic convolution for each layer of a stack."""
        given, layers = self.encoder_kernel_sizes, self.encoder_layers
        if is_decoder:
            given, layers = self.decoder_kernel_sizes, self.decoder_layers
        sizes = given or KERNEL_SIZES
        return [sizes[min(layer, len(sizes) - 1)] for layer in range(layers)]

    @property
    def wide_heads(self) -> int:
        """The number of heads of the first self-attention in a decoder cell of the Evolved Transformer.

        It is twice the number of decoder heads, at most 16, and never less than the number of decoder heads.
        """
        return max(self.decoder_attention_heads, min(2 * self.decoder_attention_heads, 16))

    @property
    def slots_per_layer(self) -> int:
        """The parent's number; a cell of the Evolved Transformer has two attentions and two convolutions."""
        return CELL_SLOTS if self.layer_form == "evolved" else 1

    @property
    def memory_rest(self) -> int:
        """The parent's number; with Luna, the packed sequence follows the states of the source."""
        return self.luna_length if self.layer_form == "luna" else 0

    @property
    def num_key_value_heads(self) -> int:
        """The parent's number; Luna keeps two keys for each token and head."""
        # written out, because `torch.compile` cannot read a property of the parent
        return self.attention_branches * self._decoder_heads * (2 if self.layer_form == "luna" else 1)

    @property
    def least_parameters(self) -> int:
        """The parent's bound, plus the languages' matrices, mHC's maps and Luna's packed sequence.

        The size of the maps grows with the third power of the number of streams.
        """
        joints = 2 * self.encoder_layers + 3 * self.decoder_layers
        maps = joints * self.residual_streams**3 * self.d_model if self.residual == "mhc" else 0
        matrices = self.num_posteriors * self.d_model**2 if self.language_aware else 0
        return super().least_parameters + maps + matrices + self.memory_rest * self.d_model

    def validate_depth(self) -> None:
        """Check the rate of LayerDrop, and that the ways to build and join layers fit each other and their options."""
        check_rates(self, "layer_drop")
        check_used(self, USED_WITH)
        if self.residual in ("deepnorm", "b2t") and self.normalize_before:
            raise ValueError(
                f"`residual={self.residual!r}` is a way to join post-norm sub-layers; set `normalize_before=False`"
            )
        if self.residual == "rezero" and self.normalize_before:
            raise ValueError(
                "`residual='rezero'` has no LayerNorms, so `normalize_before=True` means nothing; set "
                "`normalize_before=False`"
            )
        least = min(self.encoder_layers, self.decoder_layers)
        check_bounds(self, 1, max(1, least), "aggregation_dilation", "aggregation_period")
        if self.encoder_solver is not None and self.residual != "add":
            raise ValueError(
                f"`encoder_solver={self.encoder_solver!r}` solves for layers whose sub-layers are added to their "
                f"inputs, and `residual` is {self.residual!r}; set `residual='add'`"
            )
        if self.residual == "rezero" and self.layer_aggregation in ("dlcl", "iterative", "hierarchical"):
            raise ValueError(
                "`residual='rezero'` has no LayerNorms, and "
                f"`layer_aggregation={self.layer_aggregation!r}` normalises what it combines; choose one of them"
            )
        if self.initialization == "depth_scaled" and self.residual in ("deepnorm", "b2t"):
            raise ValueError(
                f"`initialization='depth_scaled'` and `residual={self.residual!r}` both scale weights by depth; "
                "choose one of them"
            )
        self._validate_routing()
        self._validate_merged_attention()
        self._validate_languages()
        self._validate_layer_form()
        self._validate_branched_attention()
        self._validate_kernels()
        self._validate_cells()
        if self.initialization == "lipschitz" and self.init_std is not None:
            raise ValueError(
                "`initialization='lipschitz'` and `init_std` both say how weights begin; set `init_std=None`, or "
                "`initialization='xavier'`"
            )
        self._validate_joined_layers()

    def _validate_routing(self) -> None:
        """Check that all capsules have the same width."""
        check_bounds(self, 1, WIDTH, "routing_capsules")
        check_bounds(self, 1, LAYERS, "routing_iterations")
        if self.routing_capsules is not None and self.d_model % self.routing_capsules:
            raise ValueError(
                f"`routing_capsules` must divide `d_model`, which is {self.d_model}; got {self.routing_capsules}"
            )

    def _validate_merged_attention(self) -> None:
        """Check that merged attention has plain residual connections, and no relative positions.

        It computes no scores between the target's tokens.
        """
        if self.decoder_attention == "separate":
            return
        if self.residual != "add":
            raise ValueError(
                f"`decoder_attention='merged'` is a way to build plain decoder layers, and `residual` is "
                f"{self.residual!r}; set `residual='add'`"
            )
        if self.max_relative_position is not None:
            raise ValueError(
                "`decoder_attention='merged'` has no scores to which relative positions could be added; set "
                "`max_relative_position=None`"
            )

    def _validate_languages(self) -> None:
        """Check that only a language-aware model has languages, and that it is otherwise a plain post-norm model."""
        check_posterior_fields(self, "languages")
        if not self.language_aware:
            if self.num_posteriors > 1 or self.posterior_names is not None:
                raise ValueError(
                    "`num_posteriors` and `posterior_names` (in a recipe: `data.posteriors`) need a model whose "
                    "languages have parts of their own; set `language_aware=True`, or leave them out"
                )
            return
        plain = {"normalize_before": False, "residual": "add", "layer_aggregation": None, "encoder_solver": None}
        for name, value in plain.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"`language_aware=True` needs plain post-norm layers, but `{name}` is {getattr(self, name)!r}; "
                    f"set `{name}={value!r}`"
                )

    def _validate_layer_form(self) -> None:
        """Check that other forms than Transformer layers have plain residual connections, and no attention options."""
        check_bounds(self, 1, ENTRIES, "luna_length")
        if self.layer_form == "luna" and self.layer_aggregation == "transparent":
            raise ValueError(
                "`layer_aggregation='transparent'` gives each decoder layer states of its own, and "
                "`layer_form='luna'` packs the states of the last layer; choose one of them"
            )
        if self.layer_form == "transformer":
            return
        plain = {
            "residual": "add",
            "encoder_solver": None,
            "decoder_attention": "separate",
            "language_aware": False,
            "max_relative_position": None,
            "attention_branches": 1,
            "ffn_branches": 1,
            "drop_branch": 0,
            "ffn_drop_branch": None,
            "join_ffn": True,
        }
        for name, value in plain.items():
            have = getattr(self, name)
            if have != value and not (value is None and have == 0):
                raise ValueError(
                    f"`{name}` is an option of Transformer layers, and `layer_form` is {self.layer_form!r}; set "
                    f"`{name}={value!r}`, or `layer_form='transformer'`"
                )

    def _validate_branched_attention(self) -> None:
        """Check that the inner width can be divided among the networks of the heads."""
        if self.layer_form != "weighted":
            return
        for stack in ("encoder", "decoder"):
            width, heads = getattr(self, f"{stack}_ffn_dim"), getattr(self, f"{stack}_attention_heads")
            if width % heads:
                raise ValueError(
                    f"`layer_form='weighted'` divides the inner width among the heads: `{stack}_ffn_dim` must be a "
                    f"multiple of `{stack}_attention_heads`, which is {heads}; got {width}"
                )

    def _validate_kernels(self) -> None:
        """Check that kernels are at least one position wide, and that there is at most one width for each layer."""
        for stack in ("encoder", "decoder"):
            name, layers = f"{stack}_kernel_sizes", getattr(self, f"{stack}_layers")
            sizes = getattr(self, name)
            if sizes is None:
                continue
            if not 1 <= len(sizes) <= layers:
                raise ValueError(f"`{name}` must have 1 to {layers} widths, for as many layers, got {quote(sizes)}")
            if not all(isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= KERNEL for size in sizes):
                raise ValueError(f"`{name}` must hold whole numbers from 1 to {KERNEL:,}, got {quote(sizes)}")

    def _validate_cells(self) -> None:
        """Check that Evolved Transformer cells are pre-norm, start with Xavier weights, and have fitting widths."""
        if self.layer_form != "evolved":
            return
        for name, value in {"normalize_before": True, "initialization": "xavier"}.items():
            if getattr(self, name) != value:
                raise ValueError(f"`layer_form='evolved'` needs `{name}={value!r}`, got {getattr(self, name)!r}")
        if self.encoder_ffn_dim < self.d_model // 2:
            raise ValueError(
                f"`layer_form='evolved'` needs `encoder_ffn_dim` >= {self.d_model // 2}, half of `d_model`, because "
                f"it adds the outputs of branches of these two widths; got {self.encoder_ffn_dim}"
            )
        if self.d_model % self.wide_heads:
            raise ValueError(
                f"`layer_form='evolved'` has {self.wide_heads} heads in the first attention of a decoder's cell, and "
                f"they do not divide `d_model` ({self.d_model}); change `decoder_attention_heads` or `d_model`"
            )

    def _validate_joined_layers(self) -> None:
        """Check that attention residuals, hyper-connections and mHC are pre-norm, and check their sizes."""
        check_bounds(self, 1, LAYERS, "attention_block", "sinkhorn_iterations")
        check_bounds(self, 2 if self.residual == "mhc" else 1, LAYERS, "residual_streams")
        if self.residual in ("attention", "hyper", "mhc"):
            if not self.normalize_before:
                raise ValueError(
                    f"`residual={self.residual!r}` is a way to join pre-norm sub-layers; set `normalize_before=True`"
                )
            if self.layer_aggregation is not None:
                raise ValueError(
                    f"`residual={self.residual!r}` lets a layer read more than the layer before it, and so does "
                    f"`layer_aggregation={self.layer_aggregation!r}`; choose one of them"
                )
        if self.residual == "attention" and self.layer_drop:
            raise ValueError(
                "`residual='attention'` has a source for each sub-layer, which `layer_drop` would leave out; set "
                "`layer_drop=0`"
            )
