"""Train a small draft model for a larger one: ``python docs/examples/draft_model.py MODEL FOLDER``.

The small model begins with some of the larger one's layers, and with its embeddings. The larger one
answers questions about Python's reference, or the prompts of a file. The small one is trained to
give every token of the answers the same probabilities (Hinton et al., 2015).
It needs ``trioserve[transformers]``.
"""

import argparse
import math
import random
import re
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers

import trioserve

QUESTIONS = (
    "Explain this to a beginner: {}",
    "Write this in other words: {}",
    "Copy this text word for word: {}",
    "Write the sentences of this text as a JSON list: {}",
    "Ask three questions about this text: {}",
)
BATCH, LONGEST, LEARNING_RATE = 8, 384, 1e-3
AutoModel: Any = transformers.AutoModelForCausalLM  # its functions have no types
Model = Any
Example = tuple[list[int], int]  # tokens of a prompt and its answer, and how many are the prompt's


def questions() -> list[str]:
    blocks = [" ".join(text.split()) for topic in topics.values() for text in topic.split("\n\n")]
    texts = [text for text in blocks if 200 < len(text) < 600 and re.match(r"[A-Z]\w", text)]
    return [question.format(text) for text in texts for question in QUESTIONS]


def answers(model: str, prompts: list[str]) -> list[Example]:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    with trioserve.LLM(model, dtype="bfloat16") as llm:
        found = llm.chat(chats, max_tokens=128, temperature=1.0)
    examples = [([*each.prompt_token_ids, *each.token_ids], len(each.prompt_token_ids))
                for each in found]  # fmt: skip
    return [example for example in examples if len(example[0]) <= LONGEST]


def first_student(teacher: Model, num_layers: int) -> Model:
    fields = teacher.config.to_dict()
    of_all = (fields["num_hidden_layers"] - 1) / max(num_layers - 1, 1)
    config = type(teacher.config)(
        **{**fields, "num_hidden_layers": num_layers, "layer_types": None}
    )
    student = AutoModel.from_config(config, dtype=torch.float32)
    weights = teacher.state_dict()
    for name, weight in student.state_dict().items():
        own = re.sub(r"(?<=layers\.)\d+", lambda at: str(round(int(at[0]) * of_all)), name)
        weight.copy_(weights[own])
    return student


def difference(student: Model, teacher: Model, batch: list[Example]) -> tuple[Any, float]:
    """Return the divergence of the models on answers, and how often their best tokens agree."""
    length = max(len(tokens) for tokens, _ in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    answered = torch.zeros(len(batch), length, dtype=torch.bool)
    for row, (tokens, prompt) in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        answered[row, prompt - 1 : len(tokens) - 1] = True
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            wanted = teacher(ids).logits[answered].float().log_softmax(-1)
        given = student(ids).logits[answered].float().log_softmax(-1)
    agree = (given.argmax(-1) == wanted.argmax(-1)).float().mean()
    loss = torch.nn.functional.kl_div(given, wanted, log_target=True, reduction="batchmean")
    return loss, float(agree)


def train(student: Model, teacher: Model, examples: list[Example], minutes: float) -> None:
    optimizer = torch.optim.AdamW(student.parameters(), betas=(0.9, 0.95))
    began, latest = time.monotonic(), []
    while (passed := (time.monotonic() - began) / (60 * minutes)) < 1:
        loss, agreement = difference(student, teacher, random.sample(examples, BATCH))
        latest.append(agreement)
        rate = min(len(latest) / 20, 1.0) * (1 + math.cos(math.pi * passed)) / 2
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        if len(latest) % 10 == 0:
            print(f"{passed:4.0%}: {sum(latest[-10:]) / 10:.0%} of tokens agree", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="folder of the larger model")
    parser.add_argument("folder", help="folder that the draft model is written to")
    parser.add_argument("--prompts", type=Path, help="file with a prompt in each line")
    parser.add_argument("--layers", type=int, default=4, help="layers to keep (default: 4)")
    parser.add_argument("--minutes", type=float, default=15, help="time to train (default: 15)")
    given = parser.parse_args()
    prompts = given.prompts.read_text().splitlines() if given.prompts else questions()
    examples = answers(given.model, prompts)
    print(sum(len(tokens) - prompt for tokens, prompt in examples), "tokens to learn from")
    teacher = AutoModel.from_pretrained(given.model, dtype=torch.bfloat16)
    student = first_student(teacher, given.layers)
    train(student, teacher, examples, given.minutes)
    student.to(torch.bfloat16).save_pretrained(given.folder)
    transformers.AutoTokenizer.from_pretrained(given.model).save_pretrained(given.folder)


if __name__ == "__main__":
    main()
