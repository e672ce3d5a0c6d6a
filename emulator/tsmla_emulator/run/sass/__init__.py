"""Machine code of Hopper and Blackwell GPUs (SASS): its instructions as data, and how they are read from bytes."""
