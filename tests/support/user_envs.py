"""Environments as users write them, well and badly. Imported by tests and, by name, in scoring processes."""

import os
import random
import re
import signal
import stat
import subprocess
import sys
import threading
import time

import numpy as np

from trainer.rl.envs import Environment, Score


class Double(Environment):
    def __init__(self, largest: int = 99):
        self.largest = largest

    def sample(self, rng):
        number = int(rng.integers(self.largest + 1))
        return f"What is twice {number}?", {"answer": str(2 * number)}

    def score(self, info, completion):
        return float(completion.strip() == info["answer"])


class Wild(Double):
    """Its reward function does what the completion says."""

    def score(self, info, completion):
        what, _, rest = completion.partition(" ")
        match what:
            case "raise":
                raise ValueError("no such luck\nsecond line")
            case "hang":
                time.sleep(3600)
            case "spawn":  # a grandchild that would outlive a hang
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", rest])
                time.sleep(3600)
            case "leave":
                os._exit(7)
            case "signal":  # one without a name
                os.kill(os.getpid(), signal.SIGRTMIN + 6)
                time.sleep(3600)
            case "fork":  # a child that comes back from here as well
                child = os.fork()
                if child == 0 and rest.isdecimal():
                    sys.exit(int(rest))
                if child == 0 and rest:
                    raise ValueError(rest)
                if child == 0:
                    return 1.0
                return Score(0.25, {"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})
            case "daemon":  # its child is in no group of this process's, and keeps the connection open
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(float(rest))
                    os._exit(0)
                time.sleep(3600)
            case "write":  # to the trainer, past the answer
                os.write(own_connection(), int(rest.partition(" ")[0]).to_bytes(4) + rest.partition(" ")[2].encode())
                time.sleep(3600)
            case "stop":  # once it has answered
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
            case "regex":  # the interpreter is not let go
                re.match("(a+)+$", "a" * 60 + "b")
            case "exit":
                sys.exit("bye")
            case "nan":
                return float("nan")
            case "infinite":
                return Score(1.0, {"part": float("inf")})
            case "text":
                return "0.5"
            case "none":
                return None
            case "numpy":
                return Score(np.float32(0.25), {"half": np.array(0.5)})
            case "true":
                return True
            case "print":
                print('{"reward": 1.0, "parts": {}}', flush=True)
                os.write(1, b"\0\0\0\1{")
                os.write(2, b"to standard error\n")
                return 0.75
            case "random":
                return Score(random.random(), {"numpy": np.random.random()})
            case "meet":  # returns once as many are here as the number says
                folder, _, count = rest.rpartition(" ")
                open(os.path.join(folder, str(os.getpid())), "w").close()
                while len(os.listdir(folder)) < int(count):
                    time.sleep(0.01)
                return float(os.getpid())
            case "pid":
                return float(os.getpid())
        return 0.5


def own_connection() -> int:
    """The scoring process's descriptor of what it answers through."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    return next(number for number in numbers if number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode))


class Drawn(Double):
    """Draws while it is made."""

    def __init__(self):
        self.drawn = random.random()

    def score(self, info, completion):
        return self.drawn


class Guess(Environment):
    """Multi-turn: too low, too high, until the number is said; three wrong guesses end it."""

    def sample(self, rng):
        number = int(rng.integers(1000))
        return "Guess my number.", {"number": number}

    def prompt(self, index, split):
        return "Guess my number.", {"number": index}

    def step(self, info, messages):
        said = messages[-1]["content"]
        if said == "boom":
            raise RuntimeError("step failed")
        if said == str(info["number"]):
            return None
        return "too low" if int(said) < info["number"] else [{"role": "user", "content": "too high"}]

    def score_conversation(self, info, messages):
        turns = sum(message["role"] == "assistant" for message in messages)
        return Score(float(messages[-1]["content"] == str(info["number"])), {"turns": turns})


class Again(Environment):
    """Asks for everything twice."""

    def prompt(self, index, split):
        return "Say it.", {}

    def step(self, info, messages):
        return "again" if len(messages) == 2 else None

    def score(self, info, completion):
        return 1.0


class NotAnEnvironment:
    pass


class BadPrompt(Double):
    def __init__(self, what: str):
        self.what = what

    def prompt(self, index, split):
        if self.what == "raise":
            raise KeyError("gone")
        return {"set": ("text", {"a": {1, 2}}), "messages": ([{"content": "x"}], {}), "list": ("text", [])}[self.what]
