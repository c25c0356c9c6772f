"""The names of all environment variables that the launcher reads or sets.

The form is: a comment, then ``NAME = "VARIABLE"``, or a tuple of variables that have
one meaning. The comment says what the variable means. It also says when the launcher
sets the variable. Otherwise the launcher only reads it. A heading names the owner, or
the purpose. In the second case, the comment names the owner.

A scheduler's and an MPI launcher's variables are public constants of its file in
`schedulers`, in the same form. Variables of a site are in its TOML file. The names of
``PET_*`` follow from the options. ``docs/write_constants.py`` writes the table in
``docs/reference.md``.
"""

from __future__ import annotations

# --- Workers: torchrun sets these. In direct mode, the launcher does ------------------

# Number of the worker among all workers, from 0.
RANK = "RANK"
# Number of the worker on its node, from 0. With --virtual-local-rank, this is 0.
LOCAL_RANK = "LOCAL_RANK"
# Number of all workers.
WORLD_SIZE = "WORLD_SIZE"
# Number of workers on the node.
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
# Number of the node, from 0.
GROUP_RANK = "GROUP_RANK"
# Number of nodes.
GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
# Number of the worker among all workers with its role. There is only one role.
ROLE_RANK = "ROLE_RANK"
# Number of all workers with this role.
ROLE_WORLD_SIZE = "ROLE_WORLD_SIZE"
# Name of the role: default.
ROLE_NAME = "ROLE_NAME"
# Host of the workers' store. The launcher reads it if the job does not show the head
# node, and in direct mode.
MASTER_ADDR = "MASTER_ADDR"
# Port of the workers' store. The launcher reads it together with the host.
MASTER_PORT = "MASTER_PORT"
# The launch id. The launcher reads it to find out whether it runs inside a worker.
RUN_ID = "TORCHELASTIC_RUN_ID"
# Number of restarts so far: 0 in direct mode.
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
# Maximum number of restarts: 0 in direct mode.
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
# NCCL's errors end the worker if this is 1. torchrun also sets it unless the user has.
ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

# --- Launches by torchrun -------------------------------------------------------------

# Tells workers that the agent hosts their store (torch/distributed/rendezvous.py). The
# launcher removes it in direct mode.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# With 1, worker 0 hosts the workers' store instead of the agent. The launcher sets this
# for releases of torch whose shared store fails.
UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# Path of another Python interpreter, which runs the workers.
PYTHON_EXEC = "PYTHON_EXEC"
# Level of the logs of torchrun's agent.
LOG_LEVEL = "LOGLEVEL"
# Beginning of each line that --tee prints. The launcher sets it with --hpc-debug.
LOG_LINE_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"

# --- PyTorch --------------------------------------------------------------------------

# Level of the messages of PyTorch's C++ code. The launcher sets it with --hpc-debug,
# and if the name server does not answer.
CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
# Levels of the loggers of Python modules. The launcher sets it with --hpc-debug.
TORCH_LOGS = "TORCH_LOGS"
# File of these logs.
TORCH_LOGS_OUT = "TORCH_LOGS_OUT"
# Level of the checks of collectives. The launcher sets it with --hpc-debug.
DISTRIBUTED_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
# Settings of the allocator of GPU memory. PyTorch reads them again after a preload.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Beginning of the paths to which NCCL's watchdog writes the latest collectives.
DUMP_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

# --- Networks -------------------------------------------------------------------------

# Interface of gloo. The launcher sets it for several nodes, unless the user has.
GLOO = "GLOO_SOCKET_IFNAME"
# Interfaces of NCCL. The launcher sets it for several nodes, unless the user has.
NCCL = "NCCL_SOCKET_IFNAME"
# Level of NCCL's messages. The doctor sets this and the next two variables for its own
# workers, unless the user has set the level or the file.
NCCL_DEBUG = "NCCL_DEBUG"
# Parts of NCCL that write messages.
NCCL_DEBUG_SUBSYS = "NCCL_DEBUG_SUBSYS"
# Path of the file for NCCL's messages.
NCCL_DEBUG_FILE = "NCCL_DEBUG_FILE"
# Options of the C library's resolver (resolv.conf(5)). The launcher sets a short
# timeout if no name server can be reached.
RESOLVER_OPTIONS = "RES_OPTIONS"

# --- Threads and CPUs -----------------------------------------------------------------

# Number of OpenMP threads of a process. The launcher sets it like torchrun, or by
# --hpc-omp-threads.
OMP = "OMP_NUM_THREADS"
# The list of CPUs that GCC's libgomp uses, even if the process has other CPUs. With
# --hpc-bind, the launcher replaces it by each worker's CPUs.
CPU_LIST = "GOMP_CPU_AFFINITY"
# OpenMP libraries bind threads if one of these or GOMP_CPU_AFFINITY is set. Sources:
# the OpenMP specification, the manual of GCC's libgomp, Intel's "Thread Affinity
# Interface".
OMP_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", CPU_LIST, "KMP_AFFINITY")
# Settings of Intel's OpenMP for forks. scikit-learn sets them, so a change after a
# preload does not count.
INTEL_FORKS = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
# Number of threads of Intel's MKL. It has priority over OMP_NUM_THREADS.
MKL = "MKL_NUM_THREADS"

# --- GPUs -----------------------------------------------------------------------------

# GPUs that a process can use. Source: NVIDIA's CUDA C++ Programming Guide. The launcher
# sets it with --virtual-local-rank in direct mode.
CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
# The order in which CUDA numbers the GPUs. By default, the fast ones come first.
CUDA_ORDER = "CUDA_DEVICE_ORDER"
# The same as CUDA_VISIBLE_DEVICES, for HIP. Source: AMD's "GPU isolation techniques".
HIP_VISIBLE = "HIP_VISIBLE_DEVICES"
# The same for ROCm's runtime. The other lists count the GPUs that this one leaves.
ROCR_VISIBLE = "ROCR_VISIBLE_DEVICES"
# The same for Intel's GPUs. Source: Intel's "Level Zero environment variables".
LEVEL_ZERO_VISIBLE = "ZE_AFFINITY_MASK"

# --- Python and the system ------------------------------------------------------------

# Lets Python write the frames of a crashing process. The launcher sets it for workers.
# Forks write the frames without it.
FAULT_HANDLER = "PYTHONFAULTHANDLER"
# Folder of the user, with the site files and the key.
HOME = "HOME"
# Folder for temporary files, instead of /tmp.
TMPDIR = "TMPDIR"
# Folders in which --no-python searches the program.
PATH = "PATH"
# Folder for configuration, instead of ~/.config (XDG Base Directory Specification).
CONFIG_HOME = "XDG_CONFIG_HOME"
# Folder for caches, instead of ~/.cache. PyTorch writes its latest collectives there.
CACHE_HOME = "XDG_CACHE_HOME"
# Libraries that the system loads first. With a profiler's, the workers are not forked.
LD_PRELOAD = "LD_PRELOAD"
# Tools of NVIDIA, AMD and others get into a process by these. If one is set, the
# workers are not forked. Sources: CUPTI, NVTX, kineto's init.cpp, rocprofv3, rocr's
# flag.h, TAU's tau_exec, ld.so(8).
TOOLS = (
    *("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"),
    *("NV_NSIGHT_INJECTION_TRANSPORT_TYPE", "NV_SANITIZER_INJECTION_TRANSPORT_TYPE"),
    *("ROCP_TOOL_LIBRARIES", "ROCP_TOOL_ATTACH", "HSA_TOOLS_LIB", "OMP_TOOL_LIBRARIES"),
    *("INTEL_LIBITTNOTIFY64", "KINETO_USE_DAEMON", "LD_AUDIT"),
)

# --- The doctor -----------------------------------------------------------------------

# Path of the file for the results of the doctor's workers. The doctor sets it for its
# launch.
DOCTOR_RESULTS = "HPC_DOCTOR_RESULTS"
