"""
Draw a layer of GPT-2, forward and backward: doc/walkthrough.md's picture, for light and dark screens.

    python dev/draw_layer.py          # writes doc/layer.png and doc/layer-dark.png
"""

import os

from plot_log import head, light_and_dark, run_main

OUTPUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "doc", "layer.png")
STEPS = [  # forward step, the tensor it makes; the tensor's gradient, the backward step from there; what else it reads
    ("", "residual (B,T,C)", "dresidual (B,T,C) +=", "", ""),
    ("layernorm: ln1w, ln1b", "ln1 (B,T,C)", "dbranch (B,T,C)", "layernorm → dln1w, dln1b", "ln1_mean, ln1_rstd (B,T)"),
    ("matmul: qkvw (3C,C), qkvb", "qkv (B,T,3C)", "dqkv (B,T,3C)", "matmul → dqkvw, dqkvb", ""),
    ("attention", "atty (B,T,C)", "dbranch (B,T,C)", "attention", "att (B,NH,T,T)"),
    ("matmul: attprojw (C,C), attprojb", "attproj (B,T,C)", "", "matmul → dattprojw, dattprojb", ""),
    ("add", "residual2 (B,T,C)", "dresidual (B,T,C) +=", "", ""),
    ("layernorm: ln2w, ln2b", "ln2 (B,T,C)", "dbranch (B,T,C)", "layernorm → dln2w, dln2b", "ln2_mean, ln2_rstd (B,T)"),
    ("matmul: fcw (4C,C), fcb", "fch (B,T,4C)", "dfch (B,T,4C), in place", "matmul → dfcw, dfcb", ""),
    ("GELU", "fch_gelu (B,T,4C)", "dfch (B,T,4C)", "GELU", ""),
    ("matmul: fcprojw (C,4C), fcprojb", "fcproj (B,T,C)", "", "matmul → dfcprojw, dfcprojb", ""),
    ("add", "residual3 (B,T,C)", "dresidual (B,T,C)", "", ""),
]
LEFT, RIGHT, WIDTH, HALF = 0.4, 5.35, 2.2, 0.27  # of the columns' boxes; HALF: of a box's height
FORWARD, BACKWARD, READ = "C0", "C1", "C7"


def arrow(axes, start, end, color, **style):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>,head_width=0.17,head_length=0.4", "color": color,
                                              "shrinkA": 0, "shrinkB": 0, "linewidth": 1.3} | style)


def box(axes, x, y, text, color, width=WIDTH, half=HALF, size=10):
    corners = (x, x + width, x + width, x), (y - half, y - half, y + half, y + half)
    axes.fill(*corners, facecolor=(color, 0.13), edgecolor=color, linewidth=1.2)
    axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=size)


def stream(axes, x, side, start, end, color):
    """From one box of the residual stream to the next, around a branch, `side` away from x."""
    axes.plot((x, x + side, x + side), (start, start, end), color=color, linewidth=2.2, solid_joinstyle="round")
    arrow(axes, (x + side, end), (x, end), color, linewidth=2.2)


def draw(axes):
    axes.set(xlim=(0, 8), ylim=(10.4, -0.75))
    axes.axis("off")
    head(axes, "A layer of GPT-2, forward and backward", "dashed: which forward tensor a backward step reads, besides"
         " its weights")
    for x, text, color in ((LEFT, "forward, downwards", FORWARD), (RIGHT, "backward, upwards", BACKWARD)):
        axes.text(x + WIDTH / 2, -0.5, text, color=color, ha="center", va="center", weight="bold")
    for y, (step, tensor, gradient, back, also) in enumerate(STEPS):
        box(axes, LEFT, y, tensor, FORWARD)
        if gradient:
            box(axes, RIGHT, y, gradient, BACKWARD)
        if step:
            arrow(axes, (LEFT + 0.2, y - 1 + HALF), (LEFT + 0.2, y - HALF), FORWARD)
            axes.text(LEFT + 0.32, y - 0.5, step, fontsize=9, va="center")
        if back:  # the gradient of attproj and of fcproj is dresidual, a box further down
            arrow(axes, (RIGHT + 0.2, y + (not gradient) - HALF), (RIGHT + 0.2, y - 1 + HALF), BACKWARD)
            axes.text(RIGHT + 0.32, y - 0.5, back, fontsize=9, va="center")
            dashed, x = {"linestyle": (0, (4, 2.5)), "linewidth": 1.1}, LEFT + WIDTH
            arrow(axes, (x, y - 1), (RIGHT + 0.16, y - 0.53), READ, **dashed)
            if also:
                width = 0.25 + 0.062 * len(also)
                box(axes, x + 0.12, y - 0.45, also, FORWARD, width, 0.19, 8.5)
                arrow(axes, (x + 0.12 + width, y - 0.45), (RIGHT + 0.16, y - 0.47), READ, **dashed)
    for y in (0, 5):
        stream(axes, LEFT, -0.25, y + 0.1, y + 4.9, FORWARD)
        stream(axes, RIGHT + WIDTH, 0.25, y + 4.9, y + 0.1, BACKWARD)


def main():
    for axes in light_and_dark(OUTPUT, (8, 8)):
        draw(axes)
    print(f"wrote {os.path.relpath(OUTPUT)}")


if __name__ == "__main__":
    run_main(main)
