"""Errors, one type per thing the caller does next.

A caller's own mistake is a `ValueError` or `TypeError`; these are the conditions of a distributed run.

    ClusterError           base of all of these
      JoinRefused          this process does not fit the cluster: fix its arguments (exit code 2)
      ClusterUnavailable   the coordinator or a slot did not answer in time: see the logs, restart (exit code 4)
      DataLoss             more than r members of a stripe are gone: restore a checkpoint (exit code 3)
      TrainersLost         another trainer is gone: end, so that all of them are started again (exit code 5)
      Fenced               this process was taken for lost: start it again, as a new member (exit code 6)
      CheckpointError      a checkpoint cannot be written or read: the message says what to do (exit code 7)
        StoreUnavailable   not that it is not there, or altered: its place cannot be used now; it may be, later
      MemoryDamaged        bits of this server's memory have changed: it ends, and is rebuilt elsewhere (exit code 8)
      OtherCluster         this coordinator was found by members of another cluster: start that one's (exit code 9)
      TierFailed           the disk under a server's records is full or fails: it ends, and is rebuilt (exit code 10)
    NonFiniteGradient      a gradient is NaN or infinite: nothing was applied; skip the batch or stop
"""


class ClusterError(RuntimeError):
    """Base of the conditions that end a distributed run. `exit_code` is what the command line returns for it."""

    exit_code = 1


class JoinRefused(ClusterError):
    """The coordinator refused this process: other code parameters, another table list or another version."""

    exit_code = 2


class DataLoss(ClusterError):
    """More losses than the code can repair. The message names slots, tables and the number of rows lost."""

    exit_code = 3


class ClusterUnavailable(ClusterError):
    """Something that was needed did not answer within its time limit."""

    exit_code = 4


class TrainersLost(ClusterError):
    """A trainer was lost, so this one cannot go on. Torchrun starts all again, and they go on where they were."""

    exit_code = 5


class Fenced(ClusterError):
    """This process was taken for lost while it hung or was cut off; what it did has been given to another."""

    exit_code = 6


class CheckpointError(ClusterError):
    """A checkpoint cannot be written, found or read. The message names the file and what to do; its cause is kept."""

    exit_code = 7


class StoreUnavailable(CheckpointError):
    """The place of checkpoints cannot be read or written now: what is there may be whole, so try again later."""


class MemoryDamaged(ClusterError):
    """Memory of a server is damaged, and only another server can tell what was there. The message names the place."""

    exit_code = 8


class OtherCluster(ClusterError):
    """Members of a running cluster look for their coordinator where this one listens, and it has none of its own.

    It refuses to lead, so that the one that they look for can be started there. The message says with which options.
    """

    exit_code = 9


class TierFailed(ClusterError):
    """The file that a server keeps records in cannot be made or written. The message names folder and reason."""

    exit_code = 10


class NonFiniteGradient(FloatingPointError):
    """A gradient holds NaN or infinity. Nothing of the step was sent; the parameters stay as they were."""
