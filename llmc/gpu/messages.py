"""What a step tells other GPUs, and what it waits for. A page's model and its optimizer call these
hooks where the moment has come. On one GPU there is nobody to tell: each hook does nothing, and
says so. ZeroMessages of llmc/gpu/several/zero.py has them for several GPUs."""

# instead of a matrix's name: embeddings, biases, norms, whose gradients are sent together
REST = "rest"


class Messages:
    """Those of a run on one GPU."""

    rank, rank_count = 0, 1
    norm_groups = update_groups = ("all",)  # of AdamW's chunks, in the order of its launches

    def start(self, params, grads, received, shares, optimizer, linears):
        """Once everything is allocated. On one GPU, nothing."""

    def connect(self):
        """Before the step is captured. On one GPU, nothing."""

    def send_all_weights(self):
        """Complete the weights on every rank. On one GPU, nothing: they are."""

    # -- the model

    def step_begins(self):
        """An update is launched from here on. On one GPU, nothing."""

    def step_ends(self):
        """An update is launched. On one GPU, nothing."""

    def layer_begins(self, l):
        """Before layer l's matrices are read. On one GPU, nothing: they are here."""

    def gradient_done(self, name, l=None, event=None):
        """The gradient of layer l's matrix `name`, or of all of REST, is complete after the event
        (None: on the main stream). On one GPU, nothing."""

    # -- the optimizer

    def wait_for_gradients(self):
        """Before the rest's gradients are read. On one GPU, nothing."""

    def add_up(self, total, addend, largest=False):
        """total = the sum over the ranks of addend, or the largest. On one GPU, nothing: total is
        addend."""

    def group_updated(self, group):
        """The optimizer has updated a group of chunks. On one GPU, nothing."""

    def wait_for_weights(self):
        """After the update of all groups. On one GPU, nothing."""

    def to_matrices(self, stack, share, whole):
        """share: what this rank has of a Stack of Muon's matrices, flat; whole: room for those that
        this rank works on. Returns these, (n, rows, columns). On one GPU, they are all, where they
        are."""
        return share[: stack.count * stack.size].reshape(-1, stack.rows, stack.columns)

    def to_share(self, stack, matrices, share):
        """The reverse; returns this rank's share. On one GPU, it is the matrices."""
        return matrices
