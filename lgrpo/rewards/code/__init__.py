"""Execution of the code a model writes, in a sandbox."""

from lgrpo.rewards.code.execution import CodeExecution, Execution, SandboxUnavailable

__all__ = ["CodeExecution", "Execution", "SandboxUnavailable"]
