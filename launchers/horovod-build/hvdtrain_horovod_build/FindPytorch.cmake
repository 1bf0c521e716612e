# Finds the torch of the Python that builds Horovod. Sets what Horovod's torch/CMakeLists.txt reads:
# PYTORCH_FOUND, Pytorch_VERSION, Pytorch_INCLUDE_DIRS, Pytorch_LIBRARIES, Pytorch_COMPILE_FLAGS,
# Pytorch_CXX11, Pytorch_CUDA, Pytorch_ROCM.
#
# Horovod's own module asks cpp_extension for a CUDAExtension as soon as any nvcc is found, and for
# library names that moved; this one asks torch only for its paths.

execute_process(
    COMMAND ${PY_EXE} -c "import torch; print(torch.__version__)"
    OUTPUT_VARIABLE Pytorch_VERSION OUTPUT_STRIP_TRAILING_WHITESPACE)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Pytorch REQUIRED_VARS Pytorch_VERSION VERSION_VAR Pytorch_VERSION)
if(NOT PYTORCH_FOUND)
    return()
endif()

set(_libraries c10 torch torch_cpu torch_python)
set(Pytorch_CUDA FALSE)
set(Pytorch_ROCM FALSE)
if(NOT "$ENV{HOROVOD_GPU_OPERATIONS}" STREQUAL "")
    set(Pytorch_CUDA TRUE)
    list(APPEND _libraries c10_cuda torch_cuda)
endif()

execute_process(
    COMMAND ${PY_EXE} -c "from torch.utils.cpp_extension import include_paths; print(';'.join(include_paths()))"
    OUTPUT_VARIABLE Pytorch_INCLUDE_DIRS OUTPUT_STRIP_TRAILING_WHITESPACE)
execute_process(
    COMMAND ${PY_EXE} -c "import pathlib, torch; print(pathlib.Path(torch.__file__).parent / 'lib')"
    OUTPUT_VARIABLE Pytorch_LIBRARY_DIRS OUTPUT_STRIP_TRAILING_WHITESPACE)
foreach(_library IN LISTS _libraries)
    find_library(Pytorch_LIBRARY_${_library} NAMES ${_library} HINTS ${Pytorch_LIBRARY_DIRS} NO_DEFAULT_PATH REQUIRED)
    list(APPEND Pytorch_LIBRARIES ${Pytorch_LIBRARY_${_library}})
endforeach()

set(Pytorch_CXX11 TRUE)  # torch's wheels have had the new ABI alone since 2.6
set(Pytorch_COMPILE_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=1")

# Horovod's library is defined after this. Eight of its sources are compiled as one: most of the
# time of each goes into the headers of torch and Horovod, which they share.
set(CMAKE_UNITY_BUILD ON)
set(CMAKE_UNITY_BUILD_BATCH_SIZE 8)

# Gloo, which is defined already, is compiled in the same way, except for a file that gives a name of
# Gloo's another meaning.
if(TARGET gloo)
    set_target_properties(gloo PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
    get_target_property(_gloo gloo SOURCE_DIR)
    set_source_files_properties(${_gloo}/allreduce.cc
        TARGET_DIRECTORY gloo PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    if(USE_AVX)
        # It adds up float16 by AVX. Gloo's list of sources has left it out, and the file in which USE_AVX is noted is
        # not included where the sums are called.
        target_sources(gloo PRIVATE ${_gloo}/math.cc)
        target_compile_definitions(gloo PUBLIC GLOO_USE_AVX=1)
        add_compile_definitions(GLOO_USE_AVX=1)
    endif()
endif()
