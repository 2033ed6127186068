// The instruction set that a file is compiled for.
//
// Every file but detection.cpp is compiled once for each instruction set, with that set's options and
// with TRIOSERVE_ISA as its name, and all objects are linked into one library. The name is that of a
// namespace, so no function of one instruction set has the name of another's: a linker keeps one of
// several inline functions or templates of one name, and a processor would run into instructions that it
// doesn't have. So a template of the standard library is used with a type of that namespace, or where
// it leaves no function of its own in the object; a test reads the library's symbols.
#pragma once

#ifndef TRIOSERVE_ISA
#define TRIOSERVE_ISA native
#endif

#define TRIOSERVE_JOIN_(isa, name) isa##_##name
#define TRIOSERVE_JOIN(isa, name) TRIOSERVE_JOIN_(isa, name)

// The name under which Python finds a function of this instruction set.
#define TRIOSERVE_EXPORT(name) TRIOSERVE_JOIN(TRIOSERVE_ISA, name)
