"""Hugging Face's own model tests (ModelTesterMixin, ConfigTester) on every case of the table."""

import unittest
from typing import Any

import pytest
import torch
from hf_cases import CASES, ENCODER_CASES, TINY, Case
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, ids_tensor
from transformers.testing_utils import torch_device

from hf_deepwide.families import ENCODERS

# Transformers expects this warning from each class, but Python shows it only once for each line of code.
pytestmark = pytest.mark.filterwarnings("always:.*past_key_values. is deprecated:FutureWarning")


class FamilyTester:
    """What ModelTesterMixin calls a model tester: a tiny config, a batch for it, and the sizes to expect."""

    is_training = True

    def __init__(self, case: Case, batch_size: int = 5, length: int = 7) -> None:
        self.case = case
        self.batch_size = batch_size
        self.seq_length = self.encoder_seq_length = self.decoder_seq_length = length
        config = case.config()
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_hidden_layers = config.num_hidden_layers
        self.num_attention_heads = config.num_attention_heads
        self.pad_token_id = config.pad_token_id

    def get_config(self) -> Any:
        return self.case.config()

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """A config, and sentences without special tokens inside, so that nothing is masked."""
        config, shape = self.get_config(), (self.batch_size, self.seq_length)
        first_word = 1 + max(config.pad_token_id, config.eos_token_id, config.decoder_start_token_id)
        source = ids_tensor(shape, self.vocab_size - first_word) + first_word
        source[:, -1] = config.eos_token_id
        target = ids_tensor(shape, self.vocab_size - first_word) + first_word
        target[:, 0] = config.decoder_start_token_id
        mask = torch.ones(shape, dtype=torch.long, device=torch_device)
        return config, {
            "input_ids": source,
            "attention_mask": mask,
            "decoder_input_ids": target,
            "decoder_attention_mask": mask,
        }

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


class FamilyTests(ModelTesterMixin, GenerationTesterMixin):
    """The tests of a family; `_tests_of` makes a test class of them for each case."""

    case: Case
    is_encoder_decoder = True
    test_can_init_all_missing_weights_before_2023 = True  # run it although the file of the model names no year

    def setUp(self) -> None:
        self.model_tester = FamilyTester(self.case)
        self.config_tester = ConfigTester(self, config_class=self.case.family.config)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    def test_flex_attention_with_grads(self) -> None:
        """Only a GPU runs this test. Models that read masks, or add to scores, refuse flex attention."""
        if self.case.refuses_flex_attention:
            with pytest.raises(ValueError, match="accepted: eager, sdpa"):
                super().test_flex_attention_with_grads()
        else:
            super().test_flex_attention_with_grads()


def _tests_of(case: Case) -> type[unittest.TestCase]:
    content = {"case": case, "all_model_classes": case.model_classes, "__module__": __name__}
    return type(f"Test_{case.name}", (FamilyTests, unittest.TestCase), content)


globals().update({f"Test_{case.name}": _tests_of(case) for case in CASES})


class EncoderTester(FamilyTester):
    """The same for a model without a decoder."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        super().__init__(self)

    def config(self) -> Any:
        """A tiny config; Transformers asks these models for two classes."""
        fields = {key: value for key, value in TINY.items() if not key.startswith("decoder")}
        return ENCODERS["mat_roberta"].config(**{**fields, **self.fields})

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """A config, and sentences without special tokens inside, so that nothing is masked."""
        shape = (self.batch_size, self.seq_length)
        ids = ids_tensor(shape, self.vocab_size - 3) + 3
        mask = torch.ones(shape, dtype=torch.long, device=torch_device)
        return self.config(), {"input_ids": ids, "attention_mask": mask}

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


class EncoderTests(ModelTesterMixin):
    """The tests of an encoder."""

    fields: dict[str, Any]
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self) -> None:
        self.model_tester = EncoderTester(self.fields)
        self.config_tester = ConfigTester(self, config_class=ENCODERS["mat_roberta"].config)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()


def _tests_of_encoder(name: str, fields: dict[str, Any]) -> type[unittest.TestCase]:
    row = ENCODERS["mat_roberta"]
    classes = (row.model, row.masked_lm, row.classifier)
    content = {"fields": fields, "all_model_classes": classes, "__module__": __name__}
    return type(f"Test_{name}", (EncoderTests, unittest.TestCase), content)


globals().update({f"Test_{name}": _tests_of_encoder(name, fields) for name, fields in ENCODER_CASES.items()})
