"""What only a run on more than one GPU uses.

    ranks   the processes: torchrun and torch.distributed
    zero    ZeRO: sending gradients and weights by NCCL; each rank's share of a checkpoint
"""
