"""Rollouts from vLLM servers: processes of their own, in an environment of their own, reached over HTTP only."""
