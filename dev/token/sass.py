"""Bytes and instructions of decode_token's code, from nvdisasm: python dev/token/sass.py CUBIN ..."""
import re, subprocess, sys
for path in sys.argv[1:]:
    text = subprocess.run(["nvdisasm", "-c", path], capture_output=True, text=True).stdout
    text = text[text.index(".text.decode_token:"):]
    labels, jumps, at, kinds = {}, [], 0, {}
    pending = []
    for line in text.splitlines():
        m = re.match(r"(\.L_x_\d+):", line)
        if m:
            pending.append(m[1])
            continue
        m = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", line)
        if not m:
            continue
        at = int(m[1], 16)
        for label in pending:
            labels[label] = at
        pending = []
        code = re.sub(r"^@!?U?P\w+ ", "", m[2]).split()[0]
        kinds[at] = code.split(".")[0]
        m = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if m:
            jumps.append((at, m[1]))
    loops = sorted({(at + 16 - labels[to], labels[to], at) for at, to in jumps
                    if to in labels and labels[to] < at}, reverse=True)
    print(path[-20:], "text", at + 16, "loops (bytes, from, to):",
          [(n, hex(a), hex(b)) for n, a, b in loops[:14]])
