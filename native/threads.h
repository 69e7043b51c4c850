// One pool of threads for all kernels. The calling thread takes part; workers spin briefly for the next call, then
// sleep. A worker that the operating system does not run is not waited for: the others take its share.
#pragma once

#include <cstdint>

namespace forerun {

// How many threads share a call, the caller included; at least 1.
void set_num_threads(int count);
int num_threads();

using TaskFunction = void (*)(const void* context, std::int64_t task);

// Runs function(context, task) for every task in 0..num_tasks-1, each once, in any order and on any thread, and returns
// when all are done. Called from within a task, or while another thread's call runs, it does all on this thread.
// Tasks must not throw.
void run_tasks(std::int64_t num_tasks, TaskFunction function, const void* context);

// The same for a callable body(task). One task runs on this thread at once.
template <class Body>
void parallel_for(std::int64_t num_tasks, const Body& body) {
  if (num_tasks == 1) {
    body(std::int64_t{0});
    return;
  }
  run_tasks(
      num_tasks, [](const void* context, std::int64_t task) { (*static_cast<const Body*>(context))(task); }, &body);
}

}  // namespace forerun
