"""Write what a worker sees of its process, of Python, and then of torch.

    introspection.py FOLDER

Writes two dictionaries into FOLDER/RANK.json. "seen" has no process numbers, addresses,
or times, so each launch writes the same. "own" has values that two workers may have in
common or not, such as random numbers.
"""

# The first lines import nothing that would change what they note. The rest is written
# as a user writes a script.
# ruff: noqa: E402, NPY002, PLC0415, PTH115, PTH118, PTH119, PTH123, PTH208, S311
import sys

MODULES = sorted(sys.modules)

import os

TASKS = sorted(os.listdir("/proc/self/task"))

import asyncio
import asyncio.log
import atexit
import builtins
import codecs
import concurrent.futures.thread
import contextlib
import copyreg
import ctypes
import decimal
import faulthandler
import gc
import inspect
import json
import linecache
import locale
import logging
import mimetypes
import multiprocessing
import multiprocessing.spawn
import pickle
import random
import re
import resource
import secrets
import signal
import site
import socket
import ssl
import tempfile
import threading
import time
import traceback
import tracemalloc
import uuid
import warnings
import weakref
from typing import Any

HERE = sys._getframe()
BELOW = len([*traceback.walk_stack(HERE)]) - 1  # frames
LAUNCHER = ("torchrun_hpc", "psutil", "setproctitle", "tomli")
BY_LAUNCH = ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID")
PER_PROCESS = re.compile(r" at 0x[0-9a-f]+|(?<=socket:\[)\d+|(?<=pipe:\[)\d+")
PRCTL = {
    "parent-death signal": 2,
    "dumpable": 3,
    "keeps capabilities": 7,
    "subreaper": 37,
    "no new privileges": 39,
    "huge pages disabled": 42,
}
seen: dict[str, Any] = {}
own: dict[str, Any] = {}


def add(what, values):
    """Add values as text, so that later changes do not reach them."""
    for name, value in values.items():
        text = PER_PROCESS.sub("", json.dumps(value, default=plain))
        seen[f"{what}{name}"] = json.loads(text)


def plain(value):
    """Return what JSON has for other types."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    return repr(value)


def attributes(module, names):
    """Return attributes, and what functions return that need no argument."""
    values = {name: getattr(module, name, "missing") for name in names.split()}
    return {
        name: value() if callable(value) and "hook" not in name else value
        for name, value in values.items()
    }


def by_launcher(names):
    """Return the names of others' modules, and those of the launcher's."""
    others: list[str] = []
    own_names: list[str] = []
    for name in sorted(names):
        (own_names if name.partition(".")[0] in LAUNCHER else others).append(name)
    return others, own_names


def by_owner(names):
    """Return names of modules by who brings them."""
    others, launchers = by_launcher(names)
    known = sys.stdlib_module_names | {"__main__", "__mp_main__"}
    python = [name for name in others if name.partition(".")[0] in known]
    return {
        "modules of Python": python,
        "modules of the launcher": launchers,
        "modules": sorted({*others} - {*python}),
    }


def stack(frame):
    """Return the names of a frame's functions, and of all below."""
    return [each.f_code.co_name for each, _ in traceback.walk_stack(frame)]


def depth(calls=0):
    """Return how many calls are possible."""
    try:
        return depth(calls + 1)
    except RecursionError:
        return calls


def warned():
    """Return where a warning is said to be from: below the script."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=len(stack(sys._getframe())) - BELOW + 1)
    return os.path.basename(caught[0].filename)


def failure():
    """Return the traceback of an error of the script."""
    try:
        decimal.Decimal(1) / 0
    except ArithmeticError:
        return traceback.format_exc()


def stream(name):
    """Return what a standard stream is."""
    found = getattr(sys, name)
    inner = found.buffer
    names = "encoding errors line_buffering write_through newlines mode name fileno"
    return {
        **attributes(found, f"{names} isatty closed readable writable seekable"),
        "type": type(found).__name__,
        "buffer": [type(inner).__name__, inner.mode, inner.name],
        "raw": getattr(inner, "raw", inner),
        "is the first": found is getattr(sys, f"__{name}__"),
    }


def text_of(file, number="self"):
    """Return what the kernel says of a process."""
    with open(f"/proc/{number}/{file}") as opened:
        return opened.read()


def words(text):
    """Return the words of a command line."""
    return text.replace("\0", " ").split()


def open_files():
    """Return what is open: its kind, and what an exec would do with it."""
    found: dict[int, tuple[str, bool]] = {}
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        with contextlib.suppress(OSError):  # of the list itself
            target = os.readlink(f"/proc/self/fd/{number}")
            found[number] = target, os.get_inheritable(number)
    others = [file for number, file in found.items() if number > 2]
    return {
        **{str(number): found.get(number) for number in range(3)},
        "sockets": [file for file in others if file[0].startswith("socket:")],
        "others": [file for file in others if not file[0].startswith("socket:")],
    }


def variables_of_c():
    """Return the names of the variables that C has."""
    pointers = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: list[bytes] = []
    while (entry := pointers[len(found)]) is not None:
        found.append(entry)
    return sorted(os.fsdecode(entry).partition("=")[0] for entry in found)


def process():
    """Return what the kernel has of this process."""
    lines = dict(line.split(":\t", 1) for line in text_of("status").splitlines())
    names = "Name Umask Uid Gid Groups NoNewPrivs Seccomp TracerPid CoreDumping "
    names += "CapInh CapPrm CapEff CapBnd CapAmb SigPnd ShdPnd SigBlk SigIgn SigCgt "
    names += "Cpus_allowed_list Mems_allowed_list Speculation_Store_Bypass THP_enabled"
    files = "comm oom_score_adj coredump_filter timerslack_ns cgroup limits"
    libc, options = ctypes.CDLL(None), {}
    for name, option in PRCTL.items():
        number = ctypes.c_int()
        code = libc.prctl(option, ctypes.byref(number), 0, 0, 0)
        options[name] = [code, number.value]
    mapped = {line.split()[-1] for line in text_of("maps").splitlines()}
    return {
        **{f"status {name}": lines.get(name) for name in names.split()},
        **{name: text_of(name) for name in files.split()},
        **options,
        "cmdline": words(text_of("cmdline")),
        "environ": sorted(x.partition("=")[0] for x in text_of("environ").split("\0")),
        "exe": os.readlink("/proc/self/exe"),
        "parent": words(text_of("cmdline", os.getppid())),
        "tasks": len(TASKS),
        "CPUs of all tasks": {str(sorted(os.sched_getaffinity(int(t)))) for t in TASKS},
        "libraries": {os.path.basename(name) for name in mapped if ".so" in name},
        "leads its session": os.getsid(0) == os.getpid(),
        "leads its group": os.getpgid(0) == os.getpid(),
        "personality": libc.personality(0xFFFFFFFF),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduling": [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority],
        "variables of C": variables_of_c(),
        "is quick": max(time.process_time(), time.thread_time()) < 1,
        "has used little": resource.getrusage(resource.RUSAGE_SELF).ru_utime < 1,
        "children's time": resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime,
    }


def limits():
    """Return the limits of resources."""
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return {n: resource.getrlimit(getattr(resource, n)) for n in names}


def handlers():
    """Return the actions of signals."""
    numbers = sorted(signal.valid_signals())
    named = [number for number in numbers if number < signal.SIGRTMIN]
    # SIGSTKFLT has a name since Python 3.11.
    actions = {getattr(n, "name", str(n)): signal.getsignal(n) for n in named}
    others = {signal.getsignal(number) for number in numbers if number not in named}
    return {**actions, "of others": others}


def signals():
    """Return what else there is of signals."""
    timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    return {
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "pending": signal.sigpending(),
        "timers": [signal.getitimer(timer) for timer in timers],
        "wakeup": signal.set_wakeup_fd(-1),
    }


def system():
    """Return what `os` has."""
    return {
        "environ": {k: "" if k in BY_LAUNCH else v for k, v in os.environ.items()},
        **attributes(os, "getcwd getgroups getresuid getresgid cpu_count ctermid"),
        "umask": os.umask(os.umask(0o77)),
        "nice": os.nice(0),
        "affinity": os.sched_getaffinity(0),
    }


def interpreter():
    """Return what `sys` has."""
    names = "argv orig_argv path executable _base_executable prefix base_prefix flags "
    names += "exec_prefix platlibdir _xoptions warnoptions dont_write_bytecode "
    names += "pycache_prefix getrecursionlimit getswitchinterval getdlopenflags "
    names += "getfilesystemencoding getfilesystemencodeerrors getdefaultencoding "
    names += "get_int_max_str_digits get_asyncgen_hooks gettrace getprofile exc_info "
    names += "get_coroutine_origin_tracking_depth is_finalizing excepthook displayhook "
    names += "breakpointhook unraisablehook tracebacklimit ps1 last_value thread_info"
    return {
        **attributes(sys, names),
        "meta_path": sys.meta_path,
        "path_hooks": sys.path_hooks,
        "path_importer_cache": sorted(sys.path_importer_cache),
        **by_owner(MODULES),
    }


def main_module():
    """Return what the script's module has, before the script adds to it."""
    main = sys.modules["__main__"]
    names = "__name__ __doc__ __file__ __package__ __spec__ __loader__ __cached__ "
    names += "__builtins__ __annotations__ __path__"
    return {
        **{name: getattr(main, name, "missing") for name in names.split()},
        "names": [name for name in vars(main) if name.startswith("__")],
        "is this": vars(main) is globals(),
        "type": type(main).__name__,
        "is __mp_main__": sys.modules.get("__mp_main__") is main,
        "pickles": pickle.loads(pickle.dumps(depth)) is depth,  # noqa: S301
        "source": inspect.getsource(depth)[:9],
        "module of a frame": repr(inspect.getmodule(HERE)),
    }


def frames():
    """Return what is below the script, and what shows it."""
    return {
        "below": stack(HERE)[1:],
        "possible calls": depth(),
        "warning from below": warned(),
        "traceback": failure(),
    }


def threads():
    """Return what `threading` knows."""
    main = threading.main_thread()
    names = "active_count stack_size gettrace getprofile"
    return {
        **attributes(threading, names),
        "all": [[t.name, t.daemon, type(t).__name__] for t in threading.enumerate()],
        "this is the main one": threading.current_thread() is main,
        "ident is right": main.ident == threading.get_ident(),
        "native_id is right": main.native_id == threading.get_native_id(),
        "excepthook": threading.excepthook is threading.__excepthook__,
    }


def memory():
    """Return what watches memory and ends."""
    return {
        **attributes(gc, "isenabled get_threshold get_debug get_freeze_count"),
        "gc callbacks": gc.callbacks,
        "garbage": gc.garbage,
        "tracemalloc": tracemalloc.is_tracing(),
        "faulthandler": faulthandler.is_enabled(),
        "atexit": atexit._ncallbacks(),
        "finalizers": len(vars(weakref.finalize)["_registry"]),
        "linecache": sorted(linecache.cache),
    }


def state(logger):
    """Return what a script can set of a logger."""
    values = [logger.level, logger.handlers, logger.filters]
    return [*values, getattr(logger, "propagate", None), logger.disabled]


def loggers():
    """Return the state of each logger, but for the launcher's."""
    known = logging.root.manager.loggerDict
    names = by_launcher(known)[0]
    made = [name for name in names if isinstance(known[name], logging.Logger)]
    return {name: state(known[name]) for name in made}


def logs():
    """Return what `logging` has."""
    manager = logging.root.manager
    return {
        "root": state(logging.root),
        "disabled": manager.disable,
        "names": by_launcher(manager.loggerDict)[0],
        "names of the launcher": by_launcher(manager.loggerDict)[1],
        "logger class": logging.getLoggerClass(),
        "record factory": logging.getLogRecordFactory(),
        "last resort": logging.lastResort,
        "raises": logging.raiseExceptions,
        "levels": [logging.getLevelName(level) for level in range(60)],
        "captures warnings": vars(logging)["_warnings_showwarning"],
        "asyncio has its logger": logging.getLogger("asyncio") is asyncio.log.logger,
    }


def types_of_copyreg():
    """Return the types with a function that pickles them."""
    return {kind.__name__ for kind in copyreg.dispatch_table}


def library():
    """Return global state of Python's library."""
    decimals = decimal.getcontext()
    categories = [n for n in dir(locale) if n.startswith("LC_") and n != "LC_ALL"]
    return {
        "warnings.filters": warnings.filters,
        "warnings.showwarning": warnings.showwarning.__module__,
        "warnings.once": getattr(warnings, "onceregistry", {}),
        **{n: locale.setlocale(getattr(locale, n)) for n in sorted(categories)},
        "preferred encoding": locale.getpreferredencoding(False),  # noqa: FBT003
        "locale's point": locale.localeconv()["decimal_point"],
        "tzname": time.tzname,
        "decimal": repr(decimals),
        "decimal traps": sorted(t.__name__ for t, on in decimals.traps.items() if on),
        "tempfile": [tempfile.gettempdir(), tempfile.gettempprefix(), tempfile.tempdir],
        "hostname": socket.gethostname(),
        "default timeout": socket.getdefaulttimeout(),
        "asyncio policy": type(vars(asyncio.events)["_event_loop_policy"]).__name__,
        "running loop": asyncio._get_running_loop(),
        "pools' threads": len(concurrent.futures.thread._threads_queues),
        "copyreg": types_of_copyreg(),
        "mimetypes": mimetypes.inited,
        "builtins": sorted(set(dir(builtins)) - {"_"}),
        "user site": [site.ENABLE_USER_SITE, site.getsitepackages()],
        "utf-8": codecs.lookup("utf8").name,
    }


def processes():
    """Return what `multiprocessing` has."""
    current = multiprocessing.current_process()
    method = multiprocessing.get_start_method(allow_none=True)
    names = "parent_process active_children"
    return {
        "start method": method,
        "start methods": multiprocessing.get_all_start_methods(),
        **attributes(multiprocessing, names),
        "current": [current.name, current.daemon, type(current).__name__],
        "pid": current.pid == os.getpid(),
        "executable": multiprocessing.spawn.get_executable(),
        "is spawned": getattr(current, "_inheriting", False),
    }


def of_torch():
    """Import torch and NumPy, and return their state."""
    import numpy as np
    import torch

    own["torch.initial_seed"] = torch.initial_seed()
    own["torch.rand"] = torch.rand(2).tolist()
    own["numpy.random"] = np.random.random(2).tolist()
    own["numpy.random.default_rng"] = np.random.default_rng().random()
    own["torch.Generator"] = torch.Generator().initial_seed()
    functions = "get_default_dtype get_default_device get_num_threads "
    functions += "get_num_interop_threads are_deterministic_algorithms_enabled "
    functions += "is_deterministic_algorithms_warn_only_enabled get_rng_state_size "
    functions += "get_deterministic_debug_mode is_grad_enabled is_autocast_enabled "
    functions += "is_inference_mode_enabled is_anomaly_enabled is_warn_always_enabled "
    functions += "is_anomaly_check_nan_enabled is_autocast_cache_enabled "
    functions += "get_float32_matmul_precision"
    backends = torch.backends
    return {
        "__file__": torch.__file__,
        "version": [torch.__version__, torch.version.git_version, np.__version__],
        **attributes(torch, functions),
        "autocast on CPUs": torch.is_autocast_enabled("cpu"),
        "autocast types": [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")],
        "parallel_info": torch.__config__.parallel_info(),
        "config": torch.__config__.show(),
        "print options": vars(torch._tensor_str.PRINT_OPTS),
        "mkldnn": [backends.mkldnn.is_available(), backends.mkldnn.enabled],
        "mkl and openmp": [backends.mkl.is_available(), backends.openmp.is_available()],
        "cudnn": attributes(
            backends.cudnn, "enabled benchmark deterministic allow_tf32 version"
        ),
        "matmul": [
            backends.cuda.matmul.allow_tf32,
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        ],
        "attention": attributes(
            backends.cuda,
            "flash_sdp_enabled math_sdp_enabled mem_efficient_sdp_enabled",
        ),
        "quantized": [backends.quantized.engine, backends.quantized.supported_engines],
        "CPU capability": backends.cpu.get_cpu_capability(),
        "opt_einsum": backends.opt_einsum.enabled,
        "nnpack": backends.nnpack.is_available(),
        "cuda": attributes(
            torch.cuda, "is_available is_initialized device_count _is_in_bad_fork"
        ),
        "xpu": attributes(torch.xpu, "is_available is_initialized _is_in_bad_fork"),
        "distributed": attributes(
            torch.distributed, "is_available is_initialized get_debug_level"
        ),
        "is an elastic launch": torch.distributed.is_torchelastic_launched(),
        "hub": torch.hub.get_dir(),
        "jit": bool(torch.jit._state._enabled),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "multiprocessing": torch.multiprocessing.get_start_method(allow_none=True),
        "data worker": torch.utils.data.get_worker_info(),
        "shared memory": torch.ones(2).share_memory_().is_shared(),
        "parallel sum": torch.ones(2**17).add_(1).sum().item(),
        "gradient": torch.ones(2, requires_grad=True).sum().requires_grad,
        "denormal": torch.tensor(1e-310, dtype=torch.float64).mul(1).item(),
        "NumPy print options": np.get_printoptions(),
        "NumPy errors": [np.geterr(), np.geterrcall(), np.getbufsize()],
    }


def own_values():
    """Return what each worker may have for itself."""
    return {
        "random": random.random(),
        "random.Random": random.Random().random(),
        "uuid": [str(uuid.uuid1()), str(uuid.uuid4())],
        "secrets": secrets.token_hex(),
        "os.urandom": os.urandom(8).hex(),
        "ssl": ssl.RAND_bytes(8).hex(),
        "tempfile": next(vars(tempfile)["_get_candidate_names"]()),
        "authkey": multiprocessing.current_process().authkey.hex(),
        "hash": hash("text"),
        "address": id(sys),
        "pid": os.getpid(),
    }


def main():
    """Note all, and again what an import of torch may change."""
    add("open file ", open_files())
    add("process ", process())
    add("limit ", limits())
    add("handler of ", handlers())
    add("signals: ", signals())
    add("memory: ", memory())
    add("logging: ", logs())
    add("logging: ", {"loggers": loggers()})
    add("os.", system())
    add("sys.", interpreter())
    for name in ("stdin", "stdout", "stderr"):
        add(f"sys.{name}.", stream(name))
    add("__main__: ", main_module())
    add("frames: ", frames())
    add("threading: ", threads())
    add("library: ", library())
    add("multiprocessing: ", processes())
    own.update(own_values())
    actions = handlers()
    warnings.filterwarnings("ignore", "of the script")
    add("torch: ", of_torch())
    add("after torch: ", by_owner(sys.modules))
    add("after torch: ", logs())
    add("after torch: ", threads())
    again = {
        "sys.meta_path": sys.meta_path,
        "changed handlers": {n for n, a in handlers().items() if a != actions[n]},
        "collector": [gc.isenabled(), gc.get_threshold(), gc.callbacks],
        "copyreg": types_of_copyreg(),
        "decimal": decimal.getcontext(),
        "LC_ALL": locale.setlocale(locale.LC_ALL),
        "loggers": loggers(),
        "set of warnings.filters": {*map(str, warnings.filters)},
        "order of warnings.filters": warnings.filters,
    }
    add("after torch: ", again)
    path = os.path.join(sys.argv[1], f"{os.environ['RANK']}.json")
    with open(path, "w") as file:
        json.dump({"seen": seen, "own": own}, file)


if __name__ == "__main__":
    main()
