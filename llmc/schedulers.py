"""Learning rate schedules."""

import math


def learning_rate_at(settings, step):
    """The learning rate of update `step` (from 0): linear warm-up, then the schedule, to
    final_fraction of the peak. wsd (warm-up, stable, decay) holds the peak, then falls by 1 - sqrt
    over the last fifth;
    Hägele et al. 2024, https://arxiv.org/abs/2405.18392. cooldown holds it for three tenths, then
    falls linearly."""
    peak = settings.learning_rate
    warmup = settings.warmup_steps
    total = settings.steps
    if step < warmup:
        return peak * (step + 1) / warmup
    low = peak * settings.final_fraction
    done = (step - warmup) / max(1, total - warmup)  # 0 .. 1
    if settings.schedule == "cosine":
        return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * done))
    if settings.schedule == "linear":
        return peak - (peak - low) * done
    if settings.schedule == "cooldown":
        return peak - (peak - low) * max(0.0, (done - 0.3) / 0.7)
    if settings.schedule == "wsd":
        turn = int(0.8 * total)  # as llm.c
        return (peak if step < turn
                else low + (peak - low) * (1.0 - math.sqrt((step - turn) / (total - turn))))
    return peak
