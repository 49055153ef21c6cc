"""Pages of metrics as vLLM and SGLang write them."""

POSITIONS = "".join(
    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",model_name="m",'
    f'position="{position}"}} {accepted}\n'
    for engine, counts in enumerate(((80.0, 50.0, 20.0), (40.0, 20.0, 0.0)))
    for position, accepted in enumerate(counts)
)
VLLM = f"""\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{{generation="0"}} 9210.0
process_start_time_seconds 1.79534369213e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} 0.0
vllm:generation_tokens_total{{engine="0",model_name="m"}} 300.0
vllm:generation_tokens_total{{engine="1",model_name="m"}} 100.0
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} 7.0
vllm:request_success_total{{engine="0",finished_reason="length",model_name="m"}} 3.0
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} 100.0
vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 50.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7953436e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} 300.0
vllm:spec_decode_num_draft_tokens_total{{engine="1",model_name="m"}} 150.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} 150.0
vllm:spec_decode_num_accepted_tokens_total{{engine="1",model_name="m"}} 60.0
{POSITIONS}\
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_created gauge
vllm:spec_decode_num_accepted_tokens_per_pos_created{{engine="0",model_name="m",position="0"}} 1.7953436e+09
"""
RANK = 'engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank='
SGLANG = f"""\
# HELP sglang:spec_accept_length Mean acceptance length (accepted drafts + bonus token per forward).
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{{RANK}"0"}} 2.9
sglang:spec_accept_length{{{RANK}"1"}} 2.9
sglang:spec_accept_rate{{{RANK}"0"}} 0.63
sglang:spec_num_steps{{{RANK}"0"}} 3.0
sglang:spec_num_draft_tokens{{{RANK}"0"}} 4.0
sglang:num_requests_total{{is_streaming="false",model_name="m"}} 6.0
sglang:num_requests_total{{is_streaming="true",model_name="m"}} 4.0
sglang:generation_tokens_total{{is_streaming="false",model_name="m"}} 410.0
sglang:spec_verify_calls_total{{is_streaming="false",model_name="m"}} 200.0
"""
