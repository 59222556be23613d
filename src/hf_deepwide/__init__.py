"""Deep and wide Transformers for machine translation, as Hugging Face model families.

Importing the package registers the families with the Auto classes and with CTranslate2's converter. It also registers
`pipeline("translation")`.
"""

from .data.new_languages import add_languages
from .exporting.ctranslate2_folder import export_ctranslate2
from .exporting.ctranslate2_loaders import register_loaders
from .exporting.onnx_folder import export_onnx
from .fairseq.converting import from_fairseq
from .models.configuration_depthwise_lstm import DepthwiseLSTMConfig
from .models.configuration_latent_depth import LatentDepthConfig
from .models.configuration_mat import MATConfig
from .models.configuration_mat_roberta import MATRobertaConfig
from .models.configuration_multipath_transformer import MultiPathConfig
from .models.configuration_vanilla_transformer import VanillaTransformerConfig
from .models.modeling_depthwise_lstm import DepthwiseLSTMForConditionalGeneration, DepthwiseLSTMModel
from .models.modeling_latent_depth import LatentDepthForConditionalGeneration, LatentDepthModel
from .models.modeling_latent_depth_mlm import LatentDepthForMaskedLM
from .models.modeling_mat import MATForConditionalGeneration, MATModel
from .models.modeling_mat_roberta import (
    MATRobertaForMaskedLM,
    MATRobertaForSequenceClassification,
    MATRobertaModel,
)
from .models.modeling_multipath_transformer import MultiPathForConditionalGeneration, MultiPathModel
from .models.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from .models.training_callback import LatentDepthCallback
from .prune import prune
from .registration import register
from .sharing.share import share

register()
register_loaders()

__version__ = "0.1.0"

__all__ = [
    "DepthwiseLSTMConfig",
    "DepthwiseLSTMForConditionalGeneration",
    "DepthwiseLSTMModel",
    "LatentDepthCallback",
    "LatentDepthConfig",
    "LatentDepthForConditionalGeneration",
    "LatentDepthForMaskedLM",
    "LatentDepthModel",
    "MATConfig",
    "MATForConditionalGeneration",
    "MATModel",
    "MATRobertaConfig",
    "MATRobertaForMaskedLM",
    "MATRobertaForSequenceClassification",
    "MATRobertaModel",
    "MultiPathConfig",
    "MultiPathForConditionalGeneration",
    "MultiPathModel",
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "add_languages",
    "export_ctranslate2",
    "export_onnx",
    "from_fairseq",
    "prune",
    "share",
]
