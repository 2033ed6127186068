// What the kernels ask of a processor besides arithmetic.
#pragma once

#include "isa.h"

#if defined(__x86_64__)
#include "processor_x86.h"
#elif defined(__aarch64__)
#include "processor_arm.h"
#else
#error "no such header for this processor"
#endif
