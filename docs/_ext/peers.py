"""The fields of other servers' requests, by the names of our classes.

Fields of OpenAI, Anthropic and Ollama come from their references. Those of vLLM and SGLang were
read from their sources of July and August 2026, with vLLM's former ones (``guided_json`` and
others). TensorRT-LLM, LMDeploy and llama.cpp are named only for fields that no other server has.
"""

from __future__ import annotations

__all__ = ["peers_of"]

_CONVERSATION = (
    "cache_control messages model output_config output_format system thinking tool_choice tools "
    "context_management mcp_servers speed"
)
"""Fields of both of Anthropic's requests, with those in beta."""
_OLLAMA = "format keep_alive logprobs model options shift stream think top_logprobs truncate"
"""Fields of both of Ollama's requests that generate."""
_NAMES = {
    "ChatCompletionRequest": {
        "OpenAI": (
            "audio frequency_penalty function_call functions logit_bias logprobs "
            "max_completion_tokens max_tokens messages metadata modalities model moderation n "
            "parallel_tool_calls prediction presence_penalty prompt_cache_key "
            "prompt_cache_options prompt_cache_retention reasoning_effort response_format "
            "safety_identifier seed service_tier stop store stream stream_options temperature "
            "tool_choice tools top_logprobs top_p user verbosity web_search_options"
        ),
        "vLLM": (
            "add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt "
            "chat_template chat_template_kwargs continue_final_message documents "
            "ec_transfer_params echo frequency_penalty guided_choice guided_decoding_backend "
            "guided_grammar guided_json guided_json_object guided_regex "
            "guided_whitespace_pattern ignore_eos include_reasoning include_stop_str_in_output "
            "kv_transfer_params length_penalty logit_bias logits_processors logprob_token_ids "
            "logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p "
            "min_tokens mm_processor_kwargs model n parallel_tool_calls presence_penalty "
            "priority prompt_logprobs reasoning_effort repetition_detection repetition_penalty "
            "request_id response_format return_assistant_tokens_mask return_prompt_text "
            "return_token_ids return_token_offsets return_tokens_as_token_ids "
            "routed_experts_prompt_start seed session_id skip_special_tokens "
            "spaces_between_special_tokens stop stop_token_ids stream stream_interval "
            "stream_options structured_outputs temperature thinking_token_budget tool_choice "
            "tools top_k top_logprobs top_p truncate_prompt_tokens truncation_side "
            "use_beam_search user vllm_xargs"
        ),
        "SGLang": (
            "bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs "
            "continue_final_message custom_logit_processor custom_params data_parallel_rank "
            "disagg_prefill_dp_rank ebnf extra_key frequency_penalty ignore_eos images_config "
            "input_ids logit_bias logprobs lora_path max_completion_tokens max_dynamic_patch "
            "max_tokens messages min_dynamic_patch min_p min_tokens model n no_stop_trim "
            "parallel_tool_calls presence_penalty priority reasoning_effort regex "
            "repetition_penalty response_format return_cached_tokens_details "
            "return_hidden_states return_meta_info return_prompt_token_ids "
            "return_routed_experts rid routed_dp_rank routed_experts_start_len seed "
            "separate_reasoning session_id session_params skip_special_tokens stop stop_regex "
            "stop_token_ids stream stream_options stream_reasoning task temperature tool_choice "
            "tools top_k top_logprobs top_p use_audio_in_video user"
        ),
        "TensorRT-LLM": "kv_cache_retention_config",
        "LMDeploy": "enable_thinking",
    },
    "CompletionRequest": {
        "OpenAI": (
            "best_of echo frequency_penalty logit_bias logprobs max_tokens model n "
            "presence_penalty prompt seed stop stream stream_options suffix temperature top_p "
            "user"
        ),
        "vLLM": (
            "add_special_tokens allowed_token_ids bad_words best_of cache_salt "
            "ec_transfer_params echo frequency_penalty guided_choice guided_decoding_backend "
            "guided_grammar guided_json guided_json_object guided_regex "
            "guided_whitespace_pattern ignore_eos include_stop_str_in_output kv_transfer_params "
            "length_penalty logit_bias logits_processors logprob_token_ids logprobs max_tokens "
            "min_p min_tokens model n presence_penalty priority prompt prompt_embeds "
            "prompt_logprobs repetition_detection repetition_penalty request_id response_format "
            "return_token_ids return_token_offsets return_tokens_as_token_ids "
            "routed_experts_prompt_start seed session_id skip_special_tokens "
            "spaces_between_special_tokens stop stop_token_ids stream stream_interval "
            "stream_options structured_outputs suffix temperature thinking_token_budget top_k "
            "top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs"
        ),
        "SGLang": (
            "best_of bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels "
            "custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank "
            "ebnf echo extra_key frequency_penalty ignore_eos images_config json_schema "
            "logit_bias logprobs lora_path max_tokens min_p min_tokens model n no_stop_trim "
            "presence_penalty priority prompt regex repetition_penalty response_format "
            "return_cached_tokens_details return_hidden_states return_routed_experts rid "
            "routed_dp_rank routed_experts_start_len seed session_id session_params "
            "skip_special_tokens stop stop_regex stop_token_ids stream stream_options suffix "
            "temperature top_k top_p user"
        ),
        "TensorRT-LLM": "kv_cache_retention_config",
    },
    "ResponsesRequest": {
        "OpenAI": (
            "access_programs background context_management conversation image include input "
            "instructions max_output_tokens max_tool_calls metadata model moderation "
            "parallel_tool_calls previous_response_id prompt prompt_cache_key "
            "prompt_cache_options prompt_cache_retention reasoning safety_identifier "
            "service_tier store stream stream_options temperature text tool_choice tools "
            "top_logprobs top_p truncation user"
        ),
        "vLLM": (
            "background cache_salt chat_template_kwargs ec_transfer_params "
            "enable_response_messages ignore_eos include include_stop_str_in_output input "
            "instructions kv_transfer_params logit_bias max_output_tokens max_tool_calls "
            "media_io_kwargs metadata mm_processor_kwargs model parallel_tool_calls "
            "previous_input_messages previous_response_id priority prompt prompt_cache_key "
            "reasoning repetition_penalty request_id seed service_tier skip_special_tokens stop "
            "store stream structured_outputs temperature text tool_choice tools top_k "
            "top_logprobs top_p truncation user vllm_xargs"
        ),
        "SGLang": (
            "background cache_salt chat_template_kwargs extra_key frequency_penalty include "
            "input instructions max_output_tokens max_tool_calls metadata min_p model "
            "ngram_corpus_id parallel_tool_calls presence_penalty previous_response_id priority "
            "reasoning repetition_penalty request_id service_tier session_id stop store stream "
            "temperature text tool_choice tools top_k top_logprobs top_p truncation user"
        ),
    },
    "MessageItem": {"OpenAI": "content id phase role status"},
    "InputText": {"OpenAI": "prompt_cache_breakpoint text"},
    "OutputText": {"OpenAI": "annotations logprobs text"},
    "CallItem": {"OpenAI": "arguments async call_id caller id name namespace status"},
    "CallOutputItem": {"OpenAI": "call_id caller id name namespace output status"},
    "ReasoningItem": {"OpenAI": "content encrypted_content id status summary"},
    "FunctionTool": {
        "OpenAI": (
            "allowed_callers async defer_loading description name output_schema parameters strict"
        ),
    },
    "AllowedFunctions": {"OpenAI": "mode tools"},
    "TextOptions": {"OpenAI": "format verbosity"},
    "NamedSchemaFormat": {"OpenAI": "description name schema strict"},
    "ReasoningOptions": {"OpenAI": "context effort generate_summary mode summary"},
    "ResponseQuery": {
        "OpenAI": "include include_obfuscation starting_after stream",
        "vLLM": "starting_after stream",
    },
    "InputTokensRequest": {
        "OpenAI": (
            "conversation input instructions model parallel_tool_calls personality "
            "previous_response_id reasoning text tool_choice tools truncation"
        ),
    },
    "InputItemsQuery": {"OpenAI": "after include limit order"},
    "GenerateRequest": {
        "SGLang": (
            "audio_data background bootstrap_host bootstrap_pair_key bootstrap_port "
            "bootstrap_room conversation_id custom_labels custom_logit_processor decode_tp_size "
            "disagg_prefill_dp_rank encoder_urls external_trace_header extra_key image_data "
            "image_max_dynamic_patch images_config input_embeds input_ids log_metrics "
            "logprob_start_len lora_id lora_path max_dynamic_patch min_dynamic_patch mm_hashes "
            "modalities multi_item_delimiter_indices no_logs positional_embed_overrides "
            "priority received_time require_reasoning return_bytes return_entropy "
            "return_hidden_states return_indexer_topk return_logprob return_prompt_token_ids "
            "return_routed_experts return_sampling_mask return_text_in_logprobs rid "
            "routed_dp_rank routed_experts_start_len routing_key sampling_params session_id "
            "return_normalized_logprob session_params stream stream_output text "
            "token_ids_logprob top_logprobs_num use_audio_in_video video_data "
            "video_max_dynamic_patch"
        ),
        "TensorRT-LLM": "kv_cache_retention_config",
    },
    "NativeSampling": {
        "SGLang": (
            "custom_params ebnf frequency_penalty ignore_eos json_schema logit_bias "
            "max_new_tokens min_new_tokens min_p n no_stop_trim presence_penalty regex "
            "repetition_penalty sampling_seed skip_special_tokens spaces_between_special_tokens "
            "stop stop_regex stop_token_ids stream_interval structural_tag temperature top_k "
            "top_p"
        ),
    },
    "MessagesRequest": {
        "Anthropic": (
            f"{_CONVERSATION} container diagnostics inference_geo max_tokens metadata service_tier "
            "stop_sequences stream temperature top_k top_p"
        ),
    },
    "CountTokensRequest": {"Anthropic": _CONVERSATION},
    "InputMessage": {"Anthropic": "content role"},
    "ToolDefinition": {
        "Anthropic": (
            "allowed_callers cache_control defer_loading description eager_input_streaming "
            "input_examples input_schema name strict type"
        ),
    },
    "OllamaChatRequest": {"Ollama": f"{_OLLAMA} messages tools"},
    "OllamaGenerateRequest": {
        "Ollama": (
            f"{_OLLAMA} context height images prompt raw steps suffix system template width"
        ),
    },
    "OllamaOptions": {
        "Ollama": (
            "embedding_only f16_kv frequency_penalty logits_all low_vram main_gpu min_p mirostat "
            "mirostat_eta mirostat_tau num_batch num_ctx num_gpu num_keep num_predict num_thread "
            "numa penalize_newline presence_penalty repeat_last_n repeat_penalty seed stop "
            "temperature tfs_z top_k top_p typical_p use_mlock use_mmap vocab_only"
        ),
    },
    "OllamaMessage": {
        "Ollama": "content images role thinking tool_call_id tool_calls tool_name",
    },
    "OllamaEmbeddingsRequest": {"Ollama": "keep_alive model options prompt"},
    "OllamaEmbedRequest": {"Ollama": "dimensions input keep_alive model options truncate"},
    "ShowRequest": {"Ollama": "model name options system template verbose"},
    "ApplyTemplateRequest": {
        "llama.cpp": "add_generation_prompt chat_template_kwargs messages model tool_choice tools"
    },
    "TokenizeRequest": {
        "vLLM": (
            "add_generation_prompt add_special_tokens chat_template chat_template_kwargs "
            "continue_final_message media_io_kwargs messages mm_processor_kwargs model prompt "
            "return_token_strs tools"
        ),
        "SGLang": (
            "add_special_tokens chat_template_kwargs continue_final_message messages model "
            "prompt reasoning_effort tool_choice tools"
        ),
    },
    "TranscriptionForm": {
        "OpenAI": (
            "chunking_strategy file include keywords known_speaker_names "
            "known_speaker_references language languages model prompt response_format stream "
            "temperature timestamp_granularities"
        ),
        "vLLM": (
            "file language model prompt response_format stream temperature timestamp_granularities"
        ),
        "SGLang": "file language model response_format stream temperature timestamp_granularities",
    },
    "TranslationForm": {
        "OpenAI": "file model prompt response_format temperature",
        "vLLM": "file model prompt response_format temperature",
    },
    "EmbeddingRequest": {
        "OpenAI": "dimensions encoding_format input model user",
        "vLLM": (
            "add_special_tokens cache_salt dimensions embed_dtype encoding_format endianness input "
            "messages mm_processor_kwargs model normalize padding priority request_id "
            "truncate_prompt_tokens truncation_side use_activation user"
        ),
        "SGLang": (
            "dimensions embed_override_token_id embed_overrides encoding_format input lora_path "
            "model priority rid user"
        ),
    },
    "EncodeRequest": {
        "SGLang": (
            "audio_data dimensions embed_override_token_id embed_overrides image_data "
            "input_embeds input_ids is_cross_encoder_request log_metrics lora_id lora_path "
            "modalities multi_item_delimiter_indices positional_embed_overrides priority "
            "return_pooled_hidden_states return_prompt_token_ids rid sampling_params text "
            "video_data"
        ),
    },
    "ScoreRequest": {
        "vLLM": (
            "cache_salt data_1 data_2 documents items mm_processor_kwargs model padding priority "
            "queries request_id text_1 text_2 truncate_prompt_tokens truncation_side "
            "use_activation user"
        ),
        "SGLang": (
            "apply_softmax embed_override_token_id item_embed_overrides item_first items "
            "label_token_ids model query query_embed_overrides return_pooled_hidden_states"
        ),
    },
    "RerankRequest": {
        "vLLM": (
            "cache_salt documents max_tokens_per_doc mm_processor_kwargs model padding priority "
            "query request_id top_n truncate_prompt_tokens truncation_side use_activation user"
        ),
        "SGLang": "documents instruct query return_documents top_n",
    },
    "ClassifyRequest": {
        "vLLM": (
            "activation add_special_tokens cache_salt input messages mm_processor_kwargs model "
            "padding priority request_id softmax truncate_prompt_tokens truncation_side "
            "use_activation user"
        ),
        "SGLang": "input model priority rid text user",
    },
    "OpenSessionRequest": {"SGLang": "capacity_of_str_len session_id streaming timeout"},
    "CloseSessionRequest": {"SGLang": "session_id"},
    "SessionParams": {"SGLang": "drop_previous_output id offset replace rid"},
    "PauseRequest": {"vLLM": "clear_cache mode", "SGLang": "mode"},
    "ContinueRequest": {"SGLang": "torch_empty_cache"},
    "AbortRequest": {"SGLang": "abort_all abort_message finished_reason rid"},
    "AbortManyRequest": {"vLLM": "request_ids"},
    "UpdateWeightsRequest": {
        "SGLang": (
            "abort_all_requests flush_cache is_async keep_pause load_format manifest model_path "
            "recapture_cuda_graph token_step torch_empty_cache weight_version"
        ),
    },
    "UpdateTensorsRequest": {
        "SGLang": (
            "abort_all_requests disable_draft_model flush_cache load_format "
            "serialized_named_tensors torch_empty_cache weight_version"
        ),
    },
    "UpdateWeightVersionRequest": {"SGLang": "abort_all_requests new_version"},
    "MemoryRequest": {"vLLM": "level mode tags", "SGLang": "tags"},
    "FlushRequest": {"SGLang": "timeout_s"},
    "KvCacheRetentionConfig": {
        "TensorRT-LLM": (
            "token_range_retention_configs decode_retention_priority decode_duration_ms"
        ),
    },
    "TokenRangeRetentionConfig": {"TensorRT-LLM": "token_start token_end priority duration_ms"},
    "LoadAdapterRequest": {
        "vLLM": "is_3d_lora_weight load_inplace lora_name lora_path",
        "SGLang": "added_tokens_config lora_name lora_path pinned",
    },
    "UnloadAdapterRequest": {
        "vLLM": "lora_int_id lora_name",
        "SGLang": "lora_id lora_name",
    },
    "DetokenizeRequest": {
        "vLLM": ("model tokens"),
        "SGLang": ("model skip_special_tokens tokens"),
    },
}
"""The names of the fields, by class and server."""


def peers_of(class_names: tuple[str, ...], field: str) -> list[str]:
    """Return the servers that have ``field`` in a request of one of the classes."""
    found = []
    for server in (
        "OpenAI",
        "vLLM",
        "SGLang",
        "TensorRT-LLM",
        "LMDeploy",
        "Anthropic",
        "Ollama",
        "llama.cpp",
    ):
        names = (_NAMES.get(name, {}).get(server, "") for name in class_names)
        if any(field in text.split() for text in names):
            found.append(server)
    return found
