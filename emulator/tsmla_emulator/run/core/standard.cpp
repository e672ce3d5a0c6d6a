// Functions that libc++'s headers expect in its library, and that libstdc++'s library leaves to its own headers.
#include "standard.h"

#include <new>

template class std::basic_string<char>;
template std::string std::operator+(const char*, const std::string&);

std::bad_alloc::bad_alloc() noexcept {}
std::bad_array_new_length::bad_array_new_length() noexcept {}
