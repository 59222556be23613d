"""A process trains on one device, and warns if there are more devices."""

import logging

import pytest
import torch
from transformers.training_args import ParallelMode

from hf_deepwide.training.arguments import TranslationTrainingArguments
from hf_deepwide.training.classification import ClassificationTrainingArguments


@pytest.mark.parametrize("arguments", [TranslationTrainingArguments, ClassificationTrainingArguments])
def test_one_process_takes_one_gpu(arguments, tmp_path, monkeypatch, caplog):
    args = arguments(str(tmp_path), use_cpu=True)
    assert args.n_gpu == 0
    with caplog.at_level(logging.WARNING):
        args.tell_of_idle_gpus()
    assert caplog.text == ""

    args._n_gpu = 4  # the value that Transformers sets if it finds four
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert args.n_gpu == 1
    assert args.parallel_mode == ParallelMode.NOT_PARALLEL
    args.tell_of_idle_gpus()
    assert "one of 4 GPUs" in caplog.text
    assert "accelerate launch --num_processes 4" in caplog.text


def test_an_optimizer_with_two_sets_of_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"optim is .*(?i:schedule_free_adamw).*accepted: another optimizer"):
        TranslationTrainingArguments(str(tmp_path), optim="schedule_free_adamw", use_cpu=True)
