"""Sums of two numbers of two digits: `python doc/sums.py` writes 320 to be taught (data/sums.jsonl,
for prepro_text.py --chat), 8,680 prompts to learn on by rewards (data/sums.txt), and 1,000 to test
(data/sums_test.txt). For train_rl.py, reward() is 1 for the right sum, of three digits."""

import json
import os
import random


def reward(prompt, answer):
    a, b = prompt.rstrip("=").split("+")
    return float(answer == f"{int(a) + int(b):03}")


if __name__ == "__main__":
    pairs = [f"{a:02}+{b:02}=" for a in range(100) for b in range(100)]
    random.Random(1).shuffle(pairs)
    os.makedirs("data", exist_ok=True)
    with open("data/sums.jsonl", "w") as f:
        for prompt in pairs[:320]:
            a, b = prompt.rstrip("=").split("+")
            messages = [{"role": "user", "content": prompt},
                        {"role": "assistant", "content": f"{int(a) + int(b):03}"}]
            f.write(json.dumps({"messages": messages}) + "\n")
    for name, some in (("sums", pairs[320:9000]), ("sums_test", pairs[9000:])):
        with open(f"data/{name}.txt", "w") as f:
            f.write("".join(f"{prompt}\n" for prompt in some))
    print("wrote data/sums.jsonl, data/sums.txt, data/sums_test.txt")
