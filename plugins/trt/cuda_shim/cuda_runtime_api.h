// Stands in for CUDA's header of this name: all that TensorRT's headers take from it are these handles.
#pragma once

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
