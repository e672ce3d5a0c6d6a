"""The Hopper decode of up to 64 query rows a CTA: products of warpgroups (`wgmma`)."""
