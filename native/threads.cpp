#include "threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

#if defined(__unix__)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(FORERUN_X86)
#include <immintrin.h>
#endif

namespace forerun {

namespace {

constexpr auto spin_time = std::chrono::microseconds(50);  // a few small ops of a step; beyond it, sleep
constexpr int pauses_between_looks = 32;

thread_local bool in_task = false;

void pause() {
#if defined(FORERUN_X86)
  _mm_pause();
#endif
}

int usable_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

// Waits until ready() holds: spins, gives the core away now and then, and in the end calls sleep() in a loop.
template <class Ready, class Sleep>
void wait_until(const Ready& ready, const Sleep& sleep) {
  auto start = std::chrono::steady_clock::now();
  while (!ready()) {
    for (int i = 0; i < pauses_between_looks; ++i) {
      if (ready()) return;
      pause();
    }
    if (std::chrono::steady_clock::now() - start > spin_time) {
      while (!ready()) sleep();
      return;
    }
    std::this_thread::yield();  // where cores are oversubscribed, let the thread run that we wait for
  }
}

// A job's number and the next task to be handed out are one atomic word, (number << 32 | next): a worker that wakes up
// late cannot take a task of a job whose function it has not read.
struct Pool {
  struct Job {
    std::atomic<TaskFunction> function{nullptr};
    std::atomic<const void*> context{nullptr};
    std::atomic<std::uint32_t> num_tasks{0};
  };

  std::mutex busy;                        // held by the thread whose job it is
  std::atomic<std::uint64_t> ticket{0};
  std::atomic<std::uint32_t> finished{0};  // tasks of the current job
  std::atomic<std::uint32_t> wakeups{0};   // workers sleep on this
  std::atomic<int> sleeping{0};
  std::atomic<int> wanted{1};   // threads, the caller included
  std::atomic<int> started{1};
  Job jobs[2];  // job n uses jobs[n % 2]: what a late worker reads is not written before its ticket is void

  // Takes tasks of job `number` until none is left.
  void work(std::uint32_t number) {
    const Job& job = jobs[number % 2];
    TaskFunction function = job.function.load(std::memory_order_relaxed);
    const void* context = job.context.load(std::memory_order_relaxed);
    std::uint32_t num_tasks = job.num_tasks.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);  // the job is read before the ticket that says it is valid
    std::uint64_t seen = ticket.load(std::memory_order_acquire);
    in_task = true;
    while (static_cast<std::uint32_t>(seen >> 32) == number && static_cast<std::uint32_t>(seen) < num_tasks) {
      if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
      function(context, static_cast<std::uint32_t>(seen));
      if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 == num_tasks) finished.notify_one();
      seen = ticket.load(std::memory_order_acquire);
    }
    in_task = false;
  }

  void run(std::uint32_t num_tasks, TaskFunction function, const void* context) {
    std::uint32_t number = static_cast<std::uint32_t>(ticket.load(std::memory_order_relaxed) >> 32) + 1;
    Job& job = jobs[number % 2];
    job.function.store(function, std::memory_order_relaxed);
    job.context.store(context, std::memory_order_relaxed);
    job.num_tasks.store(num_tasks, std::memory_order_relaxed);
    finished.store(0, std::memory_order_relaxed);
    ticket.store(static_cast<std::uint64_t>(number) << 32, std::memory_order_seq_cst);
    if (sleeping.load(std::memory_order_seq_cst) > 0) {
      wakeups.fetch_add(1, std::memory_order_release);
      wakeups.notify_all();
    }
    work(number);
    wait_until([&] { return finished.load(std::memory_order_acquire) == num_tasks; },
               [&] {
                 std::uint32_t now = finished.load(std::memory_order_acquire);
                 if (now != num_tasks) finished.wait(now, std::memory_order_acquire);
               });
  }

  void worker_loop(int index) {
    std::uint32_t last = 0;
    auto number = [&] { return static_cast<std::uint32_t>(ticket.load(std::memory_order_seq_cst) >> 32); };
    auto ready = [&] { return number() != last && index < wanted.load(std::memory_order_relaxed); };
    while (true) {
      wait_until(ready, [&] {
        std::uint32_t before = wakeups.load(std::memory_order_acquire);
        sleeping.fetch_add(1, std::memory_order_seq_cst);
        if (!ready()) wakeups.wait(before, std::memory_order_acquire);
        sleeping.fetch_sub(1, std::memory_order_seq_cst);
      });
      last = number();
      work(last);
    }
  }

  void start_workers() {
    for (int index = started.load(); index < wanted.load(); ++index) {
      std::thread([this, index] { worker_loop(index); }).detach();
      started.store(index + 1);
    }
  }
};

std::atomic<Pool*> instance{nullptr};

Pool* new_pool(int wanted) {
  auto* made = new Pool;
  made->wanted.store(wanted);
  return made;
}

#if defined(__unix__)
// A forked child has the memory of the pool but none of its workers.
void renew_after_fork() { instance.store(new_pool(instance.load()->wanted.load())); }
#endif

// Never destroyed: workers may sleep in it while the process ends.
Pool& pool() {
  static const bool made = [] {
    instance.store(new_pool(usable_cores()));
#if defined(__unix__)
    pthread_atfork(nullptr, nullptr, renew_after_fork);
#endif
    return true;
  }();
  (void)made;
  return *instance.load(std::memory_order_acquire);
}

}  // namespace

void set_num_threads(int count) {
  std::lock_guard lock(pool().busy);
  pool().wanted.store(std::max(1, count));
}

int num_threads() { return pool().wanted.load(); }

void run_tasks(std::int64_t num_tasks, TaskFunction function, const void* context) {
  Pool& threads = pool();
  bool alone = in_task || num_tasks <= 1 || num_tasks > UINT32_MAX || threads.wanted.load() == 1;
  if (!alone && threads.busy.try_lock()) {
    std::lock_guard lock(threads.busy, std::adopt_lock);
    threads.start_workers();
    threads.run(static_cast<std::uint32_t>(num_tasks), function, context);
    return;
  }
  for (std::int64_t task = 0; task < num_tasks; ++task) function(context, task);
}

}  // namespace forerun
