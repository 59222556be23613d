"""Fine-tuning by Transformers' own Trainer, as somebody does who has never heard of this package."""

from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)


def fine_tune(source, target):
    """Train a checkpoint for one step and save it, and a checkpoint of that step, to a folder."""
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
