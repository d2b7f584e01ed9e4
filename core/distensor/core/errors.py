"""One tree of errors. Each message names the thing, its value and what would be right.

DistensorError
+-- UserError (also ValueError)     what the caller wrote cannot work; nothing has been sent
|   +-- ConfigError                 sizes, keywords, settings
|   |   +-- UnsupportedOptionError  a known option that this version does not implement
|   |   +-- MeshTooSmallError       the mesh cannot carry it (also PlacementError, which the hub would say)
|   +-- StageMappingError           patterns against modules and parameters
|   +-- ShardingError               ShardingSpec against parameters
|   +-- BatchError                  a batch that the declared cut cannot take
|   +-- GroupMismatchError          ranks of a group call one helper with different things
|   +-- CaptureError                the module cannot become a StageProgram
|       +-- UnsupportedOpError      an operation outside the table
+-- ProgramRejectedError            a StageProgram or its weights failed validation
+-- TransportError                  the data plane
|   +-- HandshakeError              TLS or identity of a peer
|   +-- FrameError                  bytes that are not a frame of ours
|   +-- PeerLostError               a connection ended or fell silent
|   +-- TransportTimeoutError       a peer is there but did not answer in time
+-- ControlError                    the control plane
|   +-- HubUnreachableError
|   +-- HubProtocolError            the hub answered something that is not the protocol
|   +-- AuthenticationError         token, key or credential refused
|   |   +-- NotAllowedError         recognised, but this is not for its kind or scopes
|   +-- ThrottledError              too many refused attempts from one host
|   +-- PlacementError              the mesh cannot carry the job
|   +-- StaleEpochError             a message of an older membership
|   +-- JobHeldError                another trainer is there for the job
+-- JobError                        a running job
|   +-- JobFailedError
|   +-- WorkerLostError             a worker of the job ended
|   |   +-- StateLostError          nobody holds some part of the model any longer
|   +-- WorkerFailedError           a worker reported an error of its own
|   +-- DivergedError               a loss that is not a finite number
+-- LedgerError                     a transfer that the ledger forbids; nothing has changed
+-- PayoutError                     a payment service that did not answer, or answered what cannot be
+-- StoreError                      a database or files
|   +-- SupersededError             another hub writes in the same database now
|   +-- BooksRefusedError           against a rule that the database itself keeps
|   +-- ReadOnlyError               what would change something cannot be written at present
|   +-- CheckpointError             a checkpoint that is damaged, incomplete or of a newer format
+-- SessionError                    init, shutdown, local processes
+-- ServiceError                    systemd or launchd refused, or neither is there
"""

from __future__ import annotations


class DistensorError(Exception):
    """Base of every error that this package raises on purpose."""


class UserError(DistensorError, ValueError):
    """What the caller wrote cannot work; nothing has been sent."""


class ConfigError(UserError):
    """A size, keyword or setting is wrong."""


class UnsupportedOptionError(ConfigError):
    """A known option whose implementation this version does not have."""


class StageMappingError(UserError):
    """A StageMapping does not fit the module."""


class ShardingError(UserError):
    """A ShardingSpec does not fit the module."""


class BatchError(UserError):
    """A batch that the declared cut cannot take."""


class GroupMismatchError(UserError):
    """The ranks of a group called one helper with different things; every one of them raises."""


class CaptureError(UserError):
    """The module cannot become a StageProgram."""


class UnsupportedOpError(CaptureError):
    """An operation outside the table of allowed operations."""


class ProgramRejectedError(DistensorError):
    """A StageProgram or its weights failed validation; nothing of it ran."""


class TransportError(DistensorError):
    """Something went wrong on the data plane."""


class HandshakeError(TransportError):
    """TLS failed, or the peer is not who it should be."""


class FrameError(TransportError):
    """Bytes that are not a frame of this protocol."""


class PeerLostError(TransportError):
    """A peer's connection ended or fell silent."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"lost peer {'driver' if rank < 0 else f'rank {rank}'}: {reason}")
        self.rank = rank
        self.reason = reason


class TransportTimeoutError(TransportError):
    """A peer is connected but did not answer within the given time."""


class ControlError(DistensorError):
    """Something went wrong on the control plane."""


class HubUnreachableError(ControlError):
    """No hub answers at the address."""


class HubProtocolError(ControlError):
    """The other end is not a hub of a version that we understand."""


class AuthenticationError(ControlError):
    """A token, key or credential was refused."""


class NotAllowedError(AuthenticationError):
    """The caller is known, but its kind of key or its scopes do not allow this."""


class ThrottledError(ControlError):
    """Too many attempts from one host were refused; the message says when to try again."""


class PlacementError(ControlError):
    """The mesh cannot carry the job as declared."""


class MeshTooSmallError(ConfigError, PlacementError):
    """The mesh has too few workers or too little memory for what was declared; no worker has been asked."""


class StaleEpochError(ControlError):
    """A message of an older membership of the job."""


class JobHeldError(ControlError):
    """The job has a trainer that the hub hears: no other one may take it over."""


class JobError(DistensorError):
    """Something went wrong in a running job."""


class JobFailedError(JobError):
    """The job ended without finishing."""


class WorkerLostError(JobError):
    """A worker of the job ended while it was needed."""


class StateLostError(WorkerLostError):
    """With the workers that ended, a part of the model's state is gone: the job goes on from a checkpoint or not."""


class WorkerFailedError(JobError):
    """A worker reported an error of its own."""


class DivergedError(JobError):
    """A loss that is not a finite number."""


class LedgerError(DistensorError):
    """A transfer that the ledger forbids: not balanced, another one under the same key, or more than there is."""


class PayoutError(DistensorError):
    """A payment service did not answer, refused us, or said what cannot be."""


class StoreError(DistensorError):
    """A database or a file could not be read or written."""


class SupersededError(StoreError):
    """Another hub has taken the database over: this one must not write any more."""


class BooksRefusedError(StoreError):
    """A rule that the database itself keeps forbids it: trying again does not help."""


class ReadOnlyError(StoreError):
    """The books can be read but not written at present: the disk is full, or the database does not answer."""


class CheckpointError(StoreError):
    """A checkpoint that is damaged, incomplete, or of a format that this version does not read."""


class SessionError(DistensorError):
    """`init`, `shutdown` or a process of the local session failed."""


class ServiceError(DistensorError):
    """The service manager of this machine refused, or there is none."""
