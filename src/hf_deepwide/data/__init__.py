"""From raw text to padded batches, in three steps: corpora, tokenizer, batches."""
