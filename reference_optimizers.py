"""The optimizers of reference.py, in PyTorch: AdamW, and a speed run's Muon beside it. Muon: Jordan et
al. 2024, https://kellerjordan.github.io/posts/muon/"""


import torch


class MuonAndAdamW:
    """train_speedrun.py's optimizer, for updates of so many tokens."""

    PARTS = {"qkvw": 3, "attprojw": 1, "fcw": 1, "fcprojw": 1}  # 3: query, key and value apart
    FEW_TOKENS = (5, (3.4445, -4.7750, 2.0315))
    MANY_TOKENS = (12, (2, -1.5, 0.5))
    DECAY = 0.02

    @classmethod
    def steps_for(cls, tokens):
        return cls.MANY_TOKENS if tokens >= 2**17 else cls.FEW_TOKENS

    @staticmethod
    def rate(name):
        return {"wte": 28, "lm_head": 0.16}.get(name, 0.6)

    def __init__(self, model, settings, tokens):
        self.model = model
        self.settings = settings
        tensors = dict(model.named_parameters())
        self.newton_schulz = self.steps_for(tokens)
        self.matrices = [(tensors[name], torch.zeros_like(tensors[name]), parts)
                         for name, parts in self.PARTS.items()]
        groups = [{"params": [p], "lr": settings["learning_rate"] * self.rate(name)}
                  for name, p in tensors.items() if name not in self.PARTS]
        self.adamw = adamw(groups, settings, weight_decay=self.DECAY * settings["weight_decay"])

    def zero_grad(self, set_to_none=True):
        self.model.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self):
        self.adamw.step()
        for p, m, parts in self.matrices:
            for layers in zip(p, p.grad, m):
                for matrix in zip(*(layer.chunk(parts) for layer in layers)):
                    muon(*matrix, self.settings["learning_rate"], self.settings["weight_decay"],
                         *self.newton_schulz)


def muon(param, grad, momentum, learning_rate, weight_decay, steps, coefficients):
    """A step of Muon on a matrix and its momentum, in place."""
    momentum.lerp_(grad, 0.05)
    x = grad.lerp(momentum, 0.95)
    x = x.mT if param.shape[0] > param.shape[1] else x
    x = x / (x.norm() + 1e-7)
    a, b, c = coefficients
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    x = x.mT if param.shape[0] > param.shape[1] else x
    param.mul_(1 - learning_rate * weight_decay)
    param.sub_(learning_rate * max(1, param.shape[0] / param.shape[1]) ** 0.5 * x)


def adamw(parameters, settings, **options):
    return torch.optim.AdamW(parameters, lr=settings["learning_rate"],
                             betas=(settings["beta1"], settings["beta2"]),
                             eps=settings["eps"],
                             **{"weight_decay": settings["weight_decay"], **options})
