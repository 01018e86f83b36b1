"""Sums in words, for a model that speaks English: `python doc/word_sums.py` writes prompts to learn
on by rewards (data/word_sums.txt) and 200 to test (data/word_sums_test.txt). For train_rl.py,
reward() is 1 if the last number of the answer is the right one."""

import os
import random
import re

STORIES = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "There are {a} {things} in one box and {b} in another. How many {things} are there?",
    "{name} found {a} {things} on Monday and {b} on Tuesday. How many {things} is that together?",
    "A shop sold {a} {things} before noon and {b} after it. How many {things} did it sell?",
)
NAMES = "Ada", "Ben", "Chloe", "David", "Emma", "Farid", "Grace", "Hugo"
THINGS = "apples", "stamps", "marbles", "books", "shells", "coins"


def reward(prompt, answer):
    a, b = map(int, re.findall(r"\d+", prompt))
    numbers = re.findall(r"\d+", answer.replace(",", ""))
    return float(bool(numbers) and int(numbers[-1]) == a + b)


if __name__ == "__main__":
    rng = random.Random(1)
    prompts = dict.fromkeys(rng.choice(STORIES).format(
        name=rng.choice(NAMES), things=rng.choice(THINGS), a=rng.randrange(2, 50),
        b=rng.randrange(2, 50)) for _ in range(5000))
    prompts = list(prompts)
    os.makedirs("data", exist_ok=True)
    for name, some in (("word_sums", prompts[200:]), ("word_sums_test", prompts[:200])):
        with open(f"data/{name}.txt", "w") as f:
            f.write("".join(f"{prompt}\n" for prompt in some))
    print("wrote data/word_sums.txt, data/word_sums_test.txt")
