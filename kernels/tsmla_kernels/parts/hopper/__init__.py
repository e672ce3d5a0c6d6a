"""Device parts for Hopper: warpgroup MMA, rows held by four neighbouring lanes."""
