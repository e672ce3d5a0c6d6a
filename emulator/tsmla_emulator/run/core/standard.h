// Parts of the standard library that its headers alone do not hold: threads, locks, shared ownership, hash tables,
// decimal numbers. Building the other part of libc++ takes longer than building this interpreter, so nothing here uses
// it; what exceptions and memory need is in the libstdc++ that torch has loaded.
#pragma once
#include <pthread.h>

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "numbers.h"

class Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  void lock() { pthread_mutex_lock(&mutex_); }
  void unlock() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

class Guard {
 public:
  explicit Guard(Mutex& mutex) : mutex_(mutex) { mutex_.lock(); }
  Guard(const Guard&) = delete;
  ~Guard() { mutex_.unlock(); }

 private:
  Mutex& mutex_;
};

// Runs `work` in up to `most` threads, this one among them, and returns when all are done. `work` throws nothing.
template <class Work>
void in_threads(u64 most, Work& work) {
  std::vector<pthread_t> threads;
  for (pthread_t made; threads.size() + 1 < most; threads.push_back(made)) {
    auto call = [](void* given) -> void* { return (*static_cast<Work*>(given))(), nullptr; };
    if (pthread_create(&made, nullptr, call, &work)) break;  // those that there are do all the work
  }
  work();
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
}

struct Held {
  std::atomic<u64> owners{1};
  void (*end)(Held*) = nullptr;
};

// An owner of an object that has several, also in other threads. The last one to end ends the object.
template <class T>
class Shared {
 public:
  Shared() = default;
  Shared(const Shared& other) : Shared(other.held_, other.value_) {
    if (held_) held_->owners.fetch_add(1, std::memory_order_relaxed);
  }
  template <class Other>
  Shared(Shared<Other>&& other) noexcept : Shared(std::exchange(other.held_, nullptr), other.value_) {}
  Shared(Shared&& other) noexcept : Shared(std::exchange(other.held_, nullptr), other.value_) {}
  Shared& operator=(Shared other) noexcept {
    std::swap(held_, other.held_);
    std::swap(value_, other.value_);
    return *this;
  }
  ~Shared() {
    if (held_ && held_->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) held_->end(held_);
  }
  template <class... Given>
  static Shared made(Given&&... given) {
    struct Whole : Held {
      T value;
      explicit Whole(Given&&... given) : value{std::forward<Given>(given)...} {}
    };
    Whole* whole = new Whole(std::forward<Given>(given)...);
    whole->end = [](Held* held) { delete static_cast<Whole*>(held); };
    return Shared(whole, &whole->value);
  }

  T* get() const { return held_ ? value_ : nullptr; }
  T& operator*() const { return *value_; }
  T* operator->() const { return value_; }
  explicit operator bool() const { return held_; }
  bool operator==(const Shared& other) const { return held_ == other.held_; }

 private:
  template <class>
  friend class Shared;
  Shared(Held* held, T* value) : held_(held), value_(value) {}

  Held* held_ = nullptr;
  T* value_ = nullptr;
};

// Values by address. A new one may move the others.
template <class T>
class AddressMap {
 public:
  T* find(u64 address) {
    if (entries_.empty()) return nullptr;
    Entry& entry = place(address);
    return entry.used ? &entry.value : nullptr;
  }
  T& operator[](u64 address) {
    if (2 * count_ >= entries_.size()) grow();
    Entry& entry = place(address);
    if (!entry.used) entry.used = true, entry.address = address, count_++;
    return entry.value;
  }

 private:
  struct Entry {
    u64 address = 0;
    bool used = false;
    T value{};
  };

  Entry& place(u64 address) {
    u64 mask = entries_.size() - 1, at = (address * 0x9e3779b97f4a7c15ull >> 32) & mask;
    while (entries_[at].used && entries_[at].address != address) at = (at + 1) & mask;
    return entries_[at];
  }
  void grow() {
    std::vector<Entry> old(entries_.empty() ? 64 : 2 * entries_.size());
    old.swap(entries_);
    for (Entry& entry : old)
      if (entry.used) place(entry.address) = std::move(entry);
  }

  std::vector<Entry> entries_;
  u64 count_ = 0;
};

inline std::string decimal(u64 number) {
  std::string digits;
  do digits.insert(digits.begin(), char('0' + number % 10));
  while (number /= 10);
  return digits;
}
