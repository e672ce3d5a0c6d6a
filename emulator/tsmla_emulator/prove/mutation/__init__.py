"""Mutation: what checks notice when one instruction that synchronises, places or masks is changed."""
