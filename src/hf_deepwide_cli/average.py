"""Average the weights of checkpoints, as papers do with the last five.

    hf-deepwide average runs/multi30k/checkpoint-{1200,1300,1400} --output runs/multi30k-mean

The result is what `from_pretrained` loads: the mean in the checkpoints' own precision, summed in float64, with the
config, the generation config and the tokenizer of the checkpoint named last.
"""
