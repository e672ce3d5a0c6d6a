// What most of the sources include, parsed once for all of them.
#pragma once
#include <map>
#include <queue>

#include "global_touches.h"
#include "ops.h"
