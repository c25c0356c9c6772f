-- Install the wheel with the Python of the PyTorch module, into a folder of its own:
--   python -m pip install --no-deps --target=/opt/torchrun_hpc/0.3.0.dev0 torchrun_hpc-0.3.0.dev0-py3-none-any.whl
-- Add psutil and packaging to this command if the PyTorch module lacks them.

-- The administrator chooses these three.
local root = pathJoin("/opt/torchrun_hpc", myModuleVersion())
local pytorch = "PyTorch"
local site = nil  -- such as "jsc", or a site file's path; nil: the launcher recognises the site

help([[
torchrun for clusters: one command per job, everything else from the scheduler.

    srun python -m torchrun_hpc --nproc_per_node=gpu train.py
]])
whatis("Name: torchrun_hpc")
whatis("Version: " .. myModuleVersion())
whatis("Description: torchrun for clusters")

conflict("torchrun_hpc")
depends_on(pytorch)

prepend_path("PATH", pathJoin(root, "bin"))
prepend_path("PYTHONPATH", root)
if site then
    setenv("PET_HPC_SITE", site)
end
