"""Complete many prompts in a plain script: ``python docs/examples/batch_offline.py``."""

import trioserve

COUNTRIES = ("France", "Italy", "Japan", "Egypt", "Peru", "Kenya", "Norway", "India")


def main() -> None:
    prompts = [f"The capital of {country} is" for country in COUNTRIES]
    with trioserve.LLM("smollm2-135m") as llm:  # the engine runs in a thread until the block ends
        completions = llm.generate(prompts, max_tokens=8, temperature=0)  # all in one batch
    for prompt, completion in zip(prompts, completions, strict=True):
        print(f"{prompt}{completion.text.splitlines()[0]}")
    print(sum(each.usage.completion_tokens for each in completions), "tokens")


if __name__ == "__main__":
    main()
