"""Skipping outlier updates, which a batch of damaged text can cause: --skip_loss_zscore,
--skip_norm_zscore."""

import math

import numpy as np

WINDOW = 128  # updates
# struct Recent of update.cu; value n is at n % WINDOW
RECENT = np.dtype([("count", "i4"), ("values", "f4", WINDOW)])
LOSS, NORM = 0, 1  # indices into a run's (2,) RECENT


def z_score(recent, x):
    """How many standard deviations x lies above the mean of the last WINDOW values, x included, as
    in llm.c. 0 for the first WINDOW values; inf if x is not finite. Adds a finite x to `recent`, a
    RECENT."""
    if not math.isfinite(x):
        return math.inf
    recent["values"][recent["count"] % WINDOW] = x
    recent["count"] += 1
    if recent["count"] <= WINDOW:
        return 0.0
    values = recent["values"].astype(np.float64)
    deviation = values.std()
    return float((np.float32(x) - values.mean()) / deviation) if deviation else 0.0


def judge(settings, recent, loss, norm):
    """((loss's z-score, norm's), why the update is an outlier or None); both are added to `recent`,
    (2,) RECENT."""
    z_scores = z_score(recent[LOSS], loss), z_score(recent[NORM], norm)
    return z_scores, reason_to_skip(settings, *z_scores)


def reason_to_skip(settings, loss_z, norm_z):
    """Return why an update is an outlier, a text; None if it is not."""
    for what, z, limit in (("loss", loss_z, settings.skip_loss_zscore),
                           ("norm", norm_z, settings.skip_norm_zscore)):
        if limit and np.float32(z) > np.float32(limit):  # in float32, as on a GPU
            return f"{what} z-score {z:.2f}, above {limit:g}"
    return None


def notes_on(recent):
    """Losses and norms, (2,) RECENT, as a dict for a checkpoint's notes; empty without any."""
    rows = [{"count": int(row["count"]), "values": row["values"].tolist()} for row in recent]
    return {"recent": rows} if recent["count"].any() else {}


def read_recent(notes):
    """Read losses and norms, (2,) RECENT, from a checkpoint's notes."""
    recent = np.zeros(2, RECENT)
    for row, found in zip(recent, notes.get("recent", ())):
        row["count"] = found["count"]
        row["values"] = found["values"]
    return recent
