"""Fine-tuning with Transformers' own Trainer, in code that does not use this package."""

from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)


def fine_tune(source, target):
    """Train the model in `source` for one step. Save it, and the Trainer's checkpoint of that step, to `target`."""
    model = AutoModelForSeq2SeqLM.from_pretrained(source, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=True)
    ids = tokenizer(["two dogs run", "a man in a red coat"])["input_ids"]
    rows = [{"input_ids": ids[0], "labels": ids[1]}, {"input_ids": ids[1], "labels": ids[0]}]
    args = Seq2SeqTrainingArguments(
        output_dir=str(target), max_steps=1, learning_rate=0.01, use_cpu=True, report_to=[], disable_tqdm=True
    )
    collator = DataCollatorForSeq2Seq(tokenizer, model)
    trainer = Seq2SeqTrainer(model, args, train_dataset=rows, data_collator=collator, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
