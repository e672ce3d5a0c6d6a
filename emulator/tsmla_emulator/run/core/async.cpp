// The queue of asynchronous operations: in-order streams that are unordered among each other.
#include "ops.h"

void AsyncQueue::push(Stream& stream, std::unique_ptr<AsyncOp> op) {
  stream.ops.push_back(std::move(op));
  if (!stream.queued) {
    stream.queued = true;
    active_.push_back(&stream);
  }
}

void AsyncQueue::push_alone(std::unique_ptr<AsyncOp> op) {
  auto* stream = new Stream;
  stream->alone = true;
  push(*stream, std::move(op));
}

void AsyncQueue::run_one(Cluster& cluster, RandomSource& random) {
  u32 index = active_.size() > 1 ? random.below(u32(active_.size())) : 0;
  Stream* stream = active_[index];
  std::unique_ptr<AsyncOp> op = std::move(stream->ops.front());
  stream->ops.pop_front();
  if (stream->ops.empty()) {
    stream->queued = false;
    active_[index] = active_.back();
    active_.pop_back();
    if (stream->alone) delete stream;
  }
  cluster.running = op->issuer;
  cluster.running_pc = op->pc;
  op->run(cluster);
  cluster.progress++;
}

AsyncQueue::~AsyncQueue() {
  for (Stream* stream : active_)
    if (stream->alone) delete stream;
}

void submit(Cluster& cluster, Stream* stream, std::unique_ptr<AsyncOp> op) {
  if (cluster.machine.options.mode == kEager) {
    op->run(cluster);
    cluster.progress++;
  } else if (stream) {
    cluster.async.push(*stream, std::move(op));
  } else {
    cluster.async.push_alone(std::move(op));
  }
}
